"""`gaverify models` and `gaverify schema`: what the package ships."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gaverify.cli.explaining import NARROW
from gaverify.report.text.layout import Layout, plain


@click.command(short_help="List the built-in problems.")
def models() -> int:
    """Lists the built-in problems: parameters, batch, loss and what to expect."""
    from gaverify.cli.console import console as console_of
    from gaverify.zoo import BUILTINS

    entries: Any = BUILTINS.values() if isinstance(BUILTINS, Mapping) else BUILTINS
    console = console_of(highlight=False)
    if console.width < NARROW:
        layout = Layout(width=console.width)
        for entry in entries:
            click.echo(entry.name)
            for heading in ("parameters", "batch", "loss", "expect"):
                lines = layout.wrap(_cell(getattr(entry, heading)), first=f"  {heading}", indent=14)
                click.echo(plain(lines), nl=False)
    else:
        _print_table(console, entries)
    click.echo("\nRun one with `gaverify run --model NAME --steps K`.")
    return 0


def _print_table(console: Any, entries: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("model", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    for heading in ("batch", "loss", "expect"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        # Text, because rich would read the brackets of a shape as markup
        table.add_row(
            *(Text(_cell(getattr(entry, name))) for name in ("name", "parameters", "batch", "loss", "expect"))
        )
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())


@click.command(short_help="Print the JSON schema of `--format json`.")
@click.argument("command", type=click.Choice(["run", "audit", "profile"]), default="run")
def schema(command: str) -> int:
    """Prints the JSON schema of the document that `gaverify COMMAND --format json` prints (run, audit or profile)."""
    from gaverify.report.documents.schema import schema_text

    click.echo(schema_text(command))
    return 0


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return str(getattr(value, "value", value))
