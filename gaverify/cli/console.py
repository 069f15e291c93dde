"""The console that commands print on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

NARROW = 72
"""Columns of a terminal below which a table's columns would break words."""


def console(**options: Any) -> Any:
    """Returns a rich console that raises BrokenPipeError when its reader leaves; rich would exit with 1 (divergent)."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Quiet(**options)


def print_table(to: Any, columns: Mapping[str, Mapping[str, Any]], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows under bold headings, without the spaces that fill the last column.

    Args:
        to: The console, whose width the table may take.
        columns: Heading → how rich lays the column out.
        rows: Their cells as text, in which rich reads no markup: the brackets of a shape stay.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading, options in columns.items():
        table.add_column(heading, **options)
    for row in rows:
        table.add_row(*map(Text, row))
    with to.capture() as capture:
        to.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())
