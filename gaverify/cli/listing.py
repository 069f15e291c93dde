"""`gaverify models` and `gaverify schema`: what the package ships."""

from __future__ import annotations

from typing import Any

import click

from gaverify.cli.console import NARROW, console, print_table
from gaverify.report.text.layout import Layout, plain


@click.command(short_help="List the built-in problems.")
def models() -> int:
    """Lists the built-in problems: parameters, batch, loss and what to expect."""
    from gaverify.zoo import BUILTINS

    to = console(highlight=False)
    if to.width < NARROW:
        layout = Layout(width=to.width)
        for entry in BUILTINS:
            click.echo(entry.name)
            for heading in ("parameters", "batch", "loss", "expect"):
                click.echo(plain(layout.wrap(getattr(entry, heading), first=f"  {heading}", indent=14)), nl=False)
    else:
        columns: dict[str, dict[str, Any]] = {
            "model": {"no_wrap": True},
            "parameters": {"justify": "right", "no_wrap": True},
        }
        columns |= {heading: {"overflow": "fold"} for heading in ("batch", "loss", "expect")}
        print_table(to, columns, [(e.name, e.parameters, e.batch, e.loss, e.expect) for e in BUILTINS])
    click.echo("\nRun one with `gaverify run --model NAME --steps K`.")
    return 0


@click.command(short_help="Print the JSON schema of `--format json`.")
@click.argument("command", type=click.Choice(["run", "audit", "profile"]), default="run")
def schema(command: str) -> int:
    """Prints the JSON schema of the document that `gaverify COMMAND --format json` prints (run, audit or profile)."""
    from gaverify.report.documents.schema import schema_text

    click.echo(schema_text(command))
    return 0
