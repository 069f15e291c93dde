"""The terminal's report as plain text and in colour: on a terminal and as SVG, both through rich."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

from gaverify.records.profile import Profile
from gaverify.report.stories import Report
from gaverify.report.text.layout import Layout, Line, plain
from gaverify.report.text.report import report_lines

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 110
"""Columns of the SVG: the table keeps its worst elements in a column."""

_FONT_FACE = re.compile(r"@font-face\s*\{[^}]*\}\s*")


def print_lines(lines: Iterable[Line], file: IO[str], width: int) -> None:
    """Prints the lines with their colours to a terminal."""
    from rich.console import Console

    _print(lines, Console(file=file, width=width, force_terminal=True, highlight=False))


def text(report: Report) -> str:
    """Returns the report as plain text, 80 columns wide."""
    return plain(report_lines(report, Layout()))


def svg(report: Report) -> str:
    """Returns a picture that loads nothing: a profile's two plots, the terminal's report of everything else."""
    if len(report.answers) == 1 and isinstance(report.answers[0], Profile) and not report.errors:
        from gaverify.report.plot import profile_svg

        return profile_svg(report.answers[0])
    # rich points to fonts on a CDN: a report must look the same without a network and tell nobody that it was opened.
    return _FONT_FACE.sub("", _recorded(report).export_svg(title="gaverify"))


def _recorded(report: Report) -> Console:
    from rich.console import Console

    # Colours are given outright: the picture must not depend on the terminal or on NO_COLOR of whoever wrote it.
    console = Console(
        record=True, file=io.StringIO(), width=_WIDTH, force_terminal=True, color_system="truecolor", no_color=False
    )
    _print(report_lines(report, Layout(width=_WIDTH)), console)
    return console


def _print(lines: Iterable[Line], console: Console) -> None:
    from rich.text import Text

    for line in lines:
        assembled = Text.assemble(*line)
        assembled.rstrip()
        console.print(assembled, soft_wrap=True, highlight=False, markup=False, emoji=False)
