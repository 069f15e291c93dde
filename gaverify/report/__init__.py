"""Verdicts as text: terminal, JSON, JUnit, SVG, HTML. Frozen records in, strings out; no tensors, no torch.

The formats load when they are used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

import codecs
import os
import shutil
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from gaverify.errors import SpecError
from gaverify.report.files import check_writable, format_for, write_whole
from gaverify.results import Verdict

if TYPE_CHECKING:
    from gaverify.report.layout import Layout, Line

__all__ = [
    "FORMATS",
    "check_writable",
    "format_for",
    "print_summary",
    "print_verdict",
    "print_verdicts",
    "render",
    "write_reports",
]

FORMATS = ("text", "json", "junit", "svg", "html")
"""What `render` can write."""

Errors = Sequence[tuple[str, str]]

_WIDEST = 140
"""Longer lines are hard to follow with the eye."""

_NARROWEST = 60
"""The numbers of a table need so many columns; below it the terminal wraps them."""

_PICTURE = 110
"""Columns of the SVG and HTML reports: the table keeps its worst elements in a column."""


def print_verdicts(verdicts: Sequence[Verdict], *, show_all: bool = False, file: IO[str] | None = None) -> None:
    """Prints each verdict with a blank line between them, and a summary where there are several."""
    for at, verdict in enumerate(verdicts):
        if at:
            print(file=file or sys.stdout)
        print_verdict(verdict, show_all=show_all, file=file)
    if len(verdicts) > 1:
        print(file=file or sys.stdout)
        print_summary(verdicts, (), file)


def print_verdict(verdict: Verdict, *, show_all: bool = False, file: IO[str] | None = None) -> None:
    """Prints one verdict: coloured on a terminal, plain on a pipe or under `NO_COLOR`, ASCII where needed.

    Args:
        verdict: What to print.
        show_all: Every parameter; else long tables are folded to the ones that are not equivalent.
        file: Default is the present `sys.stdout`.
    """
    from gaverify.report.terminal import verdict_lines

    stream = file or sys.stdout
    layout = _layout(stream)
    _print(verdict_lines(verdict, layout, show_all), layout, stream)


def print_summary(verdicts: Sequence[Verdict], errors: Errors = (), file: IO[str] | None = None) -> None:
    """Prints one line per run, one per (source, message) of `errors`, and the count of each outcome."""
    from gaverify.report.terminal import summary_lines

    stream = file or sys.stdout
    layout = _layout(stream)
    _print(summary_lines(verdicts, errors, layout), layout, stream)


def render(verdicts: Sequence[Verdict], format: str, show_all: bool = False, errors: Errors = ()) -> str:
    """Returns the report of all verdicts in one of `FORMATS`.

    Raises:
        SpecError: An unknown format; the message names the known ones.
    """
    if format == "json":
        from gaverify.document import run_document

        return run_document(verdicts, errors) + "\n"
    if format == "junit":
        from gaverify.report.junit import junit_text

        return junit_text(verdicts, errors)
    if format not in FORMATS:
        raise SpecError(f"`{format}` is not a format; known are {', '.join(FORMATS)}")
    from gaverify.report.layout import Layout, plain

    if format == "text":
        return plain(_report(verdicts, errors, Layout(), show_all))
    from gaverify.report import picture

    draw = picture.svg if format == "svg" else picture.html
    return draw(_report(verdicts, errors, Layout(width=_PICTURE), show_all), _PICTURE)


def write_reports(
    verdicts: Sequence[Verdict],
    paths: Sequence[str | os.PathLike[str]],
    show_all: bool = False,
    errors: Errors = (),
) -> None:
    """Writes a report to each path in the format of its ending; every file is written whole or not at all.

    Raises:
        SpecError: An unknown ending, or a file that cannot be written.
    """
    texts = [(path, render(verdicts, format_for(path), show_all, errors)) for path in paths]
    for path, text in texts:
        write_whole(path, text)


def _report(verdicts: Sequence[Verdict], errors: Errors, layout: Layout, show_all: bool) -> list[Line]:
    from gaverify.report.terminal import summary_lines, verdict_lines

    lines: list[Line] = []
    for verdict in verdicts:
        lines += [[], *verdict_lines(verdict, layout, show_all)] if lines else verdict_lines(verdict, layout, show_all)
    if len(verdicts) != 1 or errors:
        lines += [*([[]] if lines else []), *summary_lines(verdicts, errors, layout)]
    return lines


def _layout(stream: IO[str]) -> Layout:
    from gaverify.report.layout import Layout

    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        width = int(columns)
    else:
        width = shutil.get_terminal_size((80, 24)).columns if _is_terminal(stream) else 80
    return Layout(width=max(_NARROWEST, min(width, _WIDEST)), ascii_only=not _is_unicode(stream))


def _print(lines: list[Line], layout: Layout, stream: IO[str]) -> None:
    if _is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        from gaverify.report.picture import print_lines

        print_lines(lines, stream, layout.width)
    else:
        from gaverify.report.layout import plain

        stream.write(plain(lines))


def _is_terminal(stream: IO[str]) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())


def _is_unicode(stream: IO[str]) -> bool:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        return codecs.lookup(encoding).name.startswith("utf")
    except LookupError:
        return False
