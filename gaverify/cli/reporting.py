"""`gaverify report`: a saved document as any other report."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gaverify.cli.showing import check_outputs, output_options
from gaverify.errors import SpecError

if TYPE_CHECKING:
    from gaverify.report import Report


@click.command(short_help="Write reports from saved JSON.")
@click.argument("documents", nargs=-1, type=click.Path(path_type=Path), metavar="JSON")
@click.option("--all", "show_all", is_flag=True, help="Show every parameter, not only the worst.")
@output_options
def report(documents: tuple[Path, ...], show_all: bool, form: str, outputs: tuple[Path, ...]) -> int:
    """Makes any report from a document that `--output FILE.json` saved.

    The exit code is that of the saved run.

    \b
      gaverify report verdict.json --output page.html
    """
    if len(documents) != 1:
        raise click.UsageError("name one JSON document: `gaverify report verdict.json`")
    _check(documents[0], outputs)
    full_report = _read(documents[0], show_all)
    _show(full_report, form, outputs)
    return full_report.code


def _check(document: Path, outputs: tuple[Path, ...]) -> None:
    check_outputs(outputs)
    source = os.path.realpath(document)
    problems = [
        f"`{path}` would overwrite the document that is read; name another file"
        for path in outputs
        if os.path.realpath(path) == source
    ]
    if problems:
        raise SpecError(problems)


def _read(document: Path, show_all: bool) -> Report:
    from gaverify.report.documents.reading import read_report

    try:
        return replace(read_report(document), show_all=show_all)
    except SpecError as error:
        raise SpecError([f"`{error.source}` {problem}" for problem in error.problems]) from error


def _show(whole: Report, form: str, outputs: tuple[Path, ...]) -> None:
    from gaverify.report import format_named, print_report, write_all

    write_all(whole, outputs)
    if form == "text":
        print_report(whole)
    else:
        click.echo(format_named(form).render(whole), nl=False)
