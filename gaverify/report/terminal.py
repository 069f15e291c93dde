"""Lines of text on a stream: coloured on a terminal, plain on a pipe or under `NO_COLOR`, ASCII where needed."""

from __future__ import annotations

import codecs
import os
import shutil
from typing import IO

from gaverify.report.text.layout import Layout, Line, plain

_WIDEST = 140
"""Longer lines are hard to follow with the eye."""

_NARROWEST = 40
"""Below it the words of a sentence no longer fit beside their label; the terminal wraps the lines."""


def layout_for(stream: IO[str]) -> Layout:
    """Returns how wide a report on `stream` may be and which characters it may have; `COLUMNS` wins."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        width = int(columns)
    else:
        width = shutil.get_terminal_size((80, 24)).columns if _is_terminal(stream) else 80
    return Layout(width=max(_NARROWEST, min(width, _WIDEST)), ascii_only=not _is_unicode(stream))


def write_lines(lines: list[Line], layout: Layout, stream: IO[str]) -> None:
    """Writes the lines, with colours where the stream shows them."""
    if _is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        from gaverify.report.picture import print_lines

        print_lines(lines, stream, layout.width)
    else:
        stream.write(plain(lines))


def _is_terminal(stream: IO[str]) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())


def _is_unicode(stream: IO[str]) -> bool:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        return codecs.lookup(encoding).name.startswith("utf")
    except LookupError:
        return False
