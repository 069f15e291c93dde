"""A repair of the user's source as edits of spans of text, which was tried on copies. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gaverify.records.json_objects import JsonRecord


@dataclass(frozen=True)
class Edit(JsonRecord):
    """Replaces a span of a file's text; an insertion has equal ends."""

    file: str
    """Absolute path of the file."""
    first_line: int
    """Line of the span's first character, counted from 1."""
    first_column: int
    """Column of that character, counted from 0 in characters."""
    last_line: int
    """Line of the character behind the span, counted from 1."""
    last_column: int
    """Column of that character, counted from 0 in characters."""
    text: str
    """The new text, with the file's own line ends."""

    @property
    def span(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Both ends, each a line and a column."""
        return (self.first_line, self.first_column), (self.last_line, self.last_column)


@dataclass(frozen=True)
class Patch(JsonRecord):
    """Edits that repair causes together."""

    edits: tuple[Edit, ...]
    """The edits, which do not overlap."""
    codes: tuple[str, ...]
    """Codes of the findings that it repairs."""
    title: str
    """A sentence: how it changes the source."""
    diff: str
    """The unified diff, with paths relative to the working folder."""
    unsafe: str = ""
    """How it changes the model or the meaning of a hyperparameter; "" for a safe patch."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each edited file as it was read."""
