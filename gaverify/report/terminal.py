"""Lines on a stream: plain or coloured, as plain text, as pytest shows a failure."""

from __future__ import annotations

import codecs
import io
import os
import shutil
from collections.abc import Iterable
from typing import IO, Any, NamedTuple

from gaverify.records.verdict import Verdict
from gaverify.report.layout import Layout, Line, plain
from gaverify.report.pages import Report
from gaverify.report.text import page_lines, report_lines
from gaverify.report.verdict_page import verdict_page

_WIDEST = 140
"""Longer lines are hard to follow with the eye."""

_NARROWEST = 40
"""Below it the words of a sentence no longer fit beside their label; the terminal wraps the lines."""


def layout_for(stream: IO[str]) -> Layout:
    """Returns how wide a report on `stream` may be and which characters it may have; `COLUMNS` wins.

    Where neither a terminal nor `COLUMNS` says how wide a line may be, names are whole.
    """
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isascii() and columns.isdigit() else 0
    width = asked or (shutil.get_terminal_size((80, 24)).columns if _is_terminal(stream) else 80)
    return Layout(
        width=max(_NARROWEST, min(width, _WIDEST)),
        ascii_only=not _is_unicode(stream),
        whole=not asked and not _is_terminal(stream),
    )


def write_lines(lines: list[Line], layout: Layout, stream: IO[str]) -> None:
    """Writes the lines, with colours where the stream shows them."""
    is_visible = _is_terminal(stream) and os.environ.get("TERM") != "dumb"
    if not os.environ.get("NO_COLOR") and (is_visible or os.environ.get("FORCE_COLOR")):
        _print_colours(lines, stream, layout.width)
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


def _print_colours(lines: Iterable[Line], stream: IO[str], width: int) -> None:
    # rich takes a while to load, and most reports go to pipes and files
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, width=width, force_terminal=True, highlight=False)
    for line in lines:
        assembled = Text.assemble(*line)
        assembled.rstrip()
        # a name may hold what rich would read as markup or an emoji
        console.print(assembled, soft_wrap=True, highlight=False, markup=False, emoji=False)


def text(report: Report) -> str:
    """Returns the report as plain text: sentences of 80 columns, names as they are."""
    return plain(report_lines(report, Layout(whole=True)))


class _Crash(NamedTuple):
    """What pytest's summary and its XML read of a failure."""

    path: str
    lineno: int
    message: str


class ReportText:
    """A verdict as pytest shows a failure: its lines in pytest's own colours.

    pytest-xdist sends no object from its workers but its text, and pytest's summary shows the first line of that: so
    the text begins with the sentence that the summary takes from `reprcrash` otherwise.
    """

    def __init__(self, verdict: Verdict, path: str, line: int) -> None:
        page = verdict_page(verdict)
        self.lines = page_lines(page, layout_for(io.StringIO()))
        self.reprcrash = _Crash(path, line, f"{verdict.outcome.value}: {page.headline.sentence}")

    def __str__(self) -> str:
        return f"{self.reprcrash.message}\n\n" + plain(self.lines).rstrip("\n")

    def toterminal(self, tw: Any) -> None:
        """Writes the report with pytest's writer, which knows whether it may colour."""
        for line in self.lines:
            for text, style in line:
                marks = dict.fromkeys((word for word in style.split() if word != "dim"), True)
                tw.write(text, **marks)
            tw.line()
