"""Documents of a command, pages that are read, and answers of any content."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from gaverify.report.documents.reading import answer_of


def only_answer(text: str) -> dict[str, Any]:
    """Returns the verdict, audit or profile of a document that holds one; it can be read."""
    document = json.loads(text)
    (answer,) = document["answers"]
    answer_of(answer)
    return answer  # type: ignore[no-any-return]


class Reader(HTMLParser):
    """Collects tags, attributes and texts of a page, and fails where a tag is closed that is not open."""

    VOID = frozenset({"meta", "input", "path", "circle", "rect", "tr", "td"})  # and those whose end may be left out

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes a tag."""
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Checks that the tag is the last one that is open."""
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Notes what is neither script nor style."""
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All that a reader sees, without line breaks."""
        return " ".join(" ".join(self.texts).split())


def records_of(kind: Any, drawn: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Returns values of the type of a record or of a field, with any content that its types allow.

    Args:
        kind: The type.
        drawn: The values of a type where not all will do; those of `float` always.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return records_of(parts[0], drawn)
    if origin is Mapping:
        values = _plain_values(drawn) if parts[1] is Any else records_of(parts[1], drawn)
        names = st.sampled_from(("full", "größe", "<b>")) if parts[0] is str else records_of(parts[0], drawn)
        return st.dictionaries(names, values, max_size=2)
    if origin is tuple:
        return st.lists(records_of(parts[0], drawn), max_size=2).map(tuple)
    if parts and origin is not Literal:
        return st.one_of(*(records_of(part, drawn) for part in parts))
    if kind in drawn:
        return drawn[kind]
    names = kind.__dict__.get("_fields", ()) if not dataclasses.is_dataclass(kind) else _written_fields(kind)
    if not names:
        return st.from_type(kind)
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: st.deferred(lambda of=hints[name]: records_of(of, drawn)) for name in names})


def _written_fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in kind.unwritten]


def _plain_values(drawn: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(("", "limit", "größe", "a b"))
    leaves = st.none() | st.booleans() | records_of(int, drawn) | drawn[float] | keys
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2), max_leaves=3
    )
