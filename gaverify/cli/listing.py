"""Lists for the user: `models`, `schema`, `rules` and the page of a rule; `doctor`, whether to believe it here."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from gaverify.cli.options import complete_kind
from gaverify.cli.streams import guests
from gaverify.errors import INTERNAL
from gaverify.records.numbers import count_text
from gaverify.spec.values import DEVICE

if TYPE_CHECKING:
    from rich.console import Console

    from gaverify.rulebook import RulePage


# `gaverify doctor`: whether gaverify's verdicts can be believed on this machine.


_MARKS = {True: "ok", False: "WRONG", None: ""}


@click.command(short_help="Check what this machine computes in.")
@click.option(
    "--device",
    metavar=DEVICE.metavar,
    help="Device to test.  [one of each kind]",
    shell_complete=partial(complete_kind, DEVICE),
)
def doctor(device: str | None) -> int:
    """Prints versions and devices, and checks that each device computes in float64 and gives the same result twice.

    Exit codes: 0 all checks passed, 2 there is no such device, 70 a check failed.
    """
    with guests():
        # Imports torch, which may print: inside `guests`, and not at the top, as `--help` must not wait for it.
        from gaverify import checkup

        lines = list(checkup.versions())
        devices = checkup.devices(device)
    wrong = _print(lines)
    for examined in devices:
        with guests():
            lines = list(checkup.support(examined))
        click.echo()
        wrong += _print(lines)
    click.echo()
    if wrong:
        click.echo(
            f"{count_text(wrong, 'check')} failed: do not trust verdicts on this machine, and report this output."
        )
        return INTERNAL
    click.echo("All checks passed.")
    return 0


def _print(lines: Iterable[tuple[str, str, bool | None]]) -> int:
    """Prints the lines and returns how many of them are wrong."""
    from gaverify.report.layout import Layout, plain

    layout = Layout(width=max(60, min(shutil.get_terminal_size((80, 24)).columns, 120)))
    wrong = 0
    for subject, answer, fine in lines:
        wrong += fine is False
        click.echo(plain(layout.wrap(answer, first=f"  {subject:<16}{_MARKS[fine]}", indent=25)), nl=False)
    return wrong


# Prints lists: `models`, `schema`, `rules` and the page of a rule.


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


@click.command(short_help="List the built-in problems.")
def models() -> int:
    """Lists the built-in problems: parameters, batch, loss and what to expect."""
    from gaverify.zoo import BUILTINS

    to = console(highlight=False)
    if to.width < NARROW:
        from gaverify.report.layout import Layout, plain

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
    from gaverify.report.documents import schema_text

    click.echo(schema_text(command))
    return 0


WIDTH = 80
LONGEST = 500
"""Columns that the table may take where nothing is known of the reader."""
VERSION = 1
"""Version of the document that `rules --format json` prints."""


def _complete_rules(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Offers codes, each with its rule's name, and names."""
    from gaverify.rulebook import rule_pages

    pages = rule_pages()
    codes = [CompletionItem(page.code, help=page.name) for page in pages if page.code.startswith(start.upper())]
    return codes or [CompletionItem(page.name, help=page.code) for page in pages if page.name.startswith(start)]


def complete_notes(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Offers the codes of notes, each with its rule's name."""
    from gaverify.rulebook import rule_pages

    pages = (page for page in rule_pages() if "note" in page.severity and page.code.startswith(start.upper()))
    return [CompletionItem(page.code, help=page.name) for page in pages]


@click.command(short_help="Explain a rule, or the words of reports.")
@click.argument("rule", metavar="CODE|words", shell_complete=_complete_rules)
def explain(rule: str) -> int:
    """Explains a rule: what it finds, why the gradients differ, an example and how to fix it.

    CODE is a code (GAV101) or a name (batch-statistics) from a report; `gaverify rules` lists them. `gaverify explain
    words` explains the words that reports use.
    """
    from gaverify.rulebook import find_page

    to = console(highlight=False)
    to.width = min(to.width, WIDTH)
    if rule == "words":
        _print_words(to)
    else:
        _print_page(to, find_page(rule))
    return 0


@click.command(short_help="List the rules.")
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", help="Format of stdout.  [text]"
)
def rules(format_: str) -> int:
    """Lists every rule: code, name, severity and what it finds."""
    from gaverify.rulebook import rule_pages

    pages = rule_pages()
    if format_ == "json":
        keys = ("code", "name", "severity", "summary", "patch")
        rows = [{key: getattr(page, key) for key in keys} for page in pages]
        click.echo(json.dumps({"version": VERSION, "rules": rows}, indent=2, ensure_ascii=False))
        return 0
    _print_table(pages)
    click.echo("\nRead one with `gaverify explain CODE`.")
    return 0


def _print_table(pages: tuple[RulePage, ...]) -> None:
    """One line per rule on a pipe; on a terminal what a rule finds wraps in its column."""
    to = console(highlight=False)
    if to.is_terminal and to.width < NARROW:
        for page in pages:
            click.echo(f"{page.code} {page.name} ({page.severity})")
            for line in textwrap.wrap(page.summary, to.width - 4):
                click.echo(f"    {line}")
        return
    if not to.is_terminal:
        # On a pipe a rule stays in one line, which grep finds.
        to.width = LONGEST
    columns: dict[str, dict[str, Any]] = {
        "code": {"no_wrap": True},
        "name": {"no_wrap": True},
        "severity": {},
        "finds": {"overflow": "fold"},
    }
    print_table(to, columns, [(page.code, page.name, page.severity, page.summary) for page in pages])


def _print_words(to: Console) -> None:
    """The page of words; its headings and the words themselves are bold, without the marks of Markdown."""
    from rich.text import Text

    from gaverify.rulebook import words_page

    for line in words_page().splitlines():
        # every second part of a line stands between two marks
        parts = [(part, "bold" if at % 2 else "") for at, part in enumerate(line.split("*"))]
        heading = Text(line.lstrip("# "), "bold cyan")
        to.print(heading if line.startswith("#") else Text.assemble(*parts), soft_wrap=True)


def _print_page(to: Console, page: RulePage) -> None:
    """A page's lines as they stand: they fit into 80 columns."""
    from rich.text import Text

    from gaverify.rulebook import PATCHES

    severity = f" ({page.severity})" if page.severity != "fault" else ""
    title = textwrap.wrap(f"{page.code} {page.name}{severity}: {page.summary}", to.width)
    to.print(Text("\n".join(title), "bold"), soft_wrap=True)
    patch = Text(textwrap.fill(f"Patch: {page.patch}. {PATCHES[page.patch]}", to.width))
    patch.highlight_regex(r"`[^`]+`", "bold")
    to.print()
    to.print(patch, soft_wrap=True)
    for heading, text in page.sections.items():
        to.print()
        to.print(Text(heading, "bold cyan"))
        styled = Text(text)
        styled.highlight_regex(r"`[^`]+`", "bold")
        styled.highlight_regex(r"https?://\S+", "underline")
        to.print(styled, soft_wrap=True)
