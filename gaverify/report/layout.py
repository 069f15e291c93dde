"""Styled lines of text that fit a width: the one form that the terminal, the pictures and plain text share.

A line is a list of (text, style) segments. No markup is ever parsed, so a parameter named `[red]` prints as it is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Segment = tuple[str, str]
Line = list[Segment]

_ASCII = dict(zip("‖×−–—…→≤·’µ", ("|", "x", "-", "-", "-", "...", "->", "<=", "-", "'", "u"), strict=True))

_BREAK = re.compile(r" (?![%×]|[mµ]?s\b)")  # a number stays with its unit


@dataclass(frozen=True)
class Layout:
    """How wide a report may be, and whether it may leave ASCII.

    Args:
        width: Columns of the terminal.
        ascii_only: The stream cannot carry anything else; other characters become escapes, not errors.
        whole: Nobody counts columns, as in a file or a pipe: sentences wrap at `width`, no name is cut.
    """

    width: int = 80
    ascii_only: bool = False
    whole: bool = False

    def text(self, value: object) -> str:
        """Returns `value` as printable text: control characters, lone surrogates and line breaks as escapes."""
        return "".join(self._character(character) for character in str(value))

    def _character(self, character: str) -> str:
        if self.ascii_only and not character.isascii():
            return _ASCII.get(character) or character.encode("ascii", "backslashreplace").decode()
        return character if character.isprintable() else character.encode("unicode_escape", "replace").decode()

    def shorten(self, value: object, width: int) -> str:
        """Returns `value` in at most `width` cells; an ellipsis stands for what is cut off at its left.

        The end of a path tells more than its beginning, and can be searched for as it stands.
        """
        text = self.text(value)
        if self.whole or cells(text) <= width:
            return text
        mark = "..." if self.ascii_only else "…"
        # what is cut off is at the left: the text is turned around, cut, and turned back
        return _cut(mark + _cut(text[::-1], max(width - len(mark), 0))[::-1], width)

    def wrap(self, value: object, first: str = "", indent: int = 0, style: str = "") -> list[Line]:
        """Returns the words of `value` after the heading `first`, later lines hanging at `indent`.

        Only a word longer than a whole line is cut, and then at its left; a path is never cut, as
        terminals and editors open it as it stands.
        """
        room = max(self.width - indent, 10)
        rows: list[str] = []
        for word in _BREAK.split(self.text(" ".join(str(value).split()))):
            # editors and terminals open a path only as it stands
            word = word if "/" in word else self.shorten(word, room)
            if rows and cells(rows[-1]) + 1 + cells(word) <= room:
                rows[-1] += " " + word
            else:
                rows.append(word)
        lead = pad(first, indent)
        return [[(lead if number == 0 else " " * indent, ""), (row, style)] for number, row in enumerate(rows)]


def clean(value: object) -> str:
    """Returns `value` as printable text of any width, as `Layout.text` does."""
    return Layout().text(value)


def cells(text: str) -> int:
    """Returns the columns that a terminal spends on `text` (two for wide characters, none for combining ones)."""
    if text.isascii():
        return len(text)
    return sum(_cell(character) for character in text)


def _cell(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _cut(text: str, room: int) -> str:
    used = 0
    for position, character in enumerate(text):
        used += _cell(character)
        if used > room:
            return text[:position]
    return text


def pad(text: str, width: int, right: bool = False) -> str:
    """Returns `text` filled with spaces to `width` cells, on its left if `right`."""
    fill = " " * max(width - cells(text), 0)
    return fill + text if right else text + fill


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[list[str]]:
    """Returns the cells of `rows` padded to the widest of their column; those in `right` are flush right."""
    flush = set(right)
    widths = [max(cells(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [[pad(cell, widths[at], at in flush) for at, cell in enumerate(row)] for row in rows]


def join_paragraphs(paragraphs: Iterable[list[Line]]) -> list[Line]:
    """Returns the paragraphs with an empty line between them; empty ones are left out."""
    lines: list[Line] = []
    for paragraph in filter(None, paragraphs):
        lines += [[], *paragraph] if lines else paragraph
    return lines


def plain(lines: Iterable[Line]) -> str:
    """Returns the lines without their styles, each ended by a newline and none with trailing spaces."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
