"""`gaverify models` and `gaverify schema`: what the package ships."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click


@click.command(short_help="List the built-in problems.")
def models() -> int:
    """Lists the built-in problems: parameters, batch, loss and what to expect."""
    from rich.table import Table
    from rich.text import Text

    from gaverify.cli.console import console as console_of
    from gaverify.zoo import BUILTINS

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("model", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    for heading in ("batch", "loss", "expect"):
        table.add_column(heading, overflow="fold")
    entries: Any = BUILTINS.values() if isinstance(BUILTINS, Mapping) else BUILTINS
    for entry in entries:
        # Text, because rich would read the brackets of a shape as markup
        table.add_row(
            *(Text(_cell(getattr(entry, name))) for name in ("name", "parameters", "batch", "loss", "expect"))
        )
    console_of().print(table)
    click.echo("\nRun one with `gaverify run --model NAME --steps K`.")
    return 0


@click.command(short_help="Print the JSON schema of `--format json`.")
@click.argument("command", type=click.Choice(["run", "audit", "profile"]), default="run")
def schema(command: str) -> int:
    """Prints the JSON schema of the document that `gaverify COMMAND --format json` prints (run, audit or profile)."""
    if command == "run":
        from gaverify.document import verdict_schema as of_document
    elif command == "audit":
        from gaverify.audit.document import audit_schema as of_document
    else:
        from gaverify.profiling.document import profile_schema as of_document
    click.echo(of_document().rstrip())
    return 0


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return str(getattr(value, "value", value))
