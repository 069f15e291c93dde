"""The terminal report in colour: on a terminal, as SVG and as HTML, all through rich."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import IO

from rich.console import Console
from rich.text import Text

from gaverify.report.layout import Line

_FONT_FACE = re.compile(r"@font-face\s*\{[^}]*\}\s*")


def print_lines(lines: Iterable[Line], file: IO[str], width: int) -> None:
    """Prints the lines with their colours to a terminal."""
    _print(lines, Console(file=file, width=width, force_terminal=True, highlight=False))


def svg(lines: Iterable[Line], width: int) -> str:
    """Returns the lines as an SVG picture that loads nothing from the network."""
    console = _recorder(lines, width)
    # rich points to fonts on a CDN: a report must look the same without a network and tell nobody that it was opened.
    return _FONT_FACE.sub("", console.export_svg(title="gaverify"))


def html(lines: Iterable[Line], width: int) -> str:
    """Returns the lines as a page of its own."""
    return _recorder(lines, width).export_html()


def _recorder(lines: Iterable[Line], width: int) -> Console:
    # Colours are given outright: the picture must not depend on the terminal or on NO_COLOR of whoever wrote it.
    console = Console(
        record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", no_color=False
    )
    _print(lines, console)
    return console


def _print(lines: Iterable[Line], console: Console) -> None:
    for line in lines:
        text = Text.assemble(*line)
        text.rstrip()
        console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)
