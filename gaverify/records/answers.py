"""What every answer has: how it prints itself, and what it was made with."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from gaverify.version import __version__, current_time, git_commit

# How an answer prints itself. Records know no format, so the package's root names the writer that does.


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


# What an answer was made with: versions, the machine, the moment and the commit.


@dataclass(frozen=True)
class Environment:
    """The versions that ran, when the answer was made, and the commit of git in its working folder."""

    torch: str = "not loaded"
    """Version of PyTorch; "not loaded" where nothing ran."""
    gaverify: str = __version__
    """Version of gaverify."""
    # Asked for when an answer is made: git and `platform.platform()` take milliseconds, which an import must not cost.
    python: str = field(default_factory=platform.python_version)
    """Version of Python."""
    platform: str = field(default_factory=platform.platform)
    """Operating system and machine, as `platform.platform()` says."""
    started: str = field(default_factory=current_time)
    """When the answer was made, UTC to the second; "" in documents that older versions wrote."""
    commit: str = field(default_factory=git_commit)
    """Git commit that was checked out in the working folder; "" outside a repository."""
