"""How an answer prints itself. Records know no format, so the package's root names the writer that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol


class AnswerWriter(Protocol):
    """Writes one answer in the forms that Python, notebooks and users ask an object for."""

    def short_text(self, answer: Any, /) -> str:
        """Returns the outcome and the findings, as `print` shows them."""

    def line_text(self, answer: Any, /) -> str:
        """Returns one line, as the interactive prompt shows it."""

    def card_html(self, answer: Any, /) -> str:
        """Returns a piece of HTML, as notebooks show it."""

    def document_text(self, answer: Any, /) -> str:
        """Returns the JSON document."""


class PrintableAnswer:
    """An answer that `print`, the interactive prompt, notebooks and `to_json` can show."""

    load_writer: ClassVar[Callable[[], AnswerWriter]]
    """Returns the writer; `gaverify/__init__.py` sets it, which runs before any module of the package."""

    def __str__(self) -> str:
        return PrintableAnswer.load_writer().short_text(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {PrintableAnswer.load_writer().line_text(self)}>"

    def _repr_html_(self) -> str:
        """Returns what Jupyter and other notebooks show of an answer."""
        return PrintableAnswer.load_writer().card_html(self)

    def to_json(self) -> str:
        """Returns the answer as a JSON document, with everything it rests on."""
        return PrintableAnswer.load_writer().document_text(self)
