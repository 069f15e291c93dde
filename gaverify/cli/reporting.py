"""`gaverify report`: saved documents as any other report, and two of them side by side."""

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

_SIDE_BY_SIDE = ("text", "html", "markdown")
"""Formats that show two reports; the others are read by programs, which know one."""


@click.command(short_help="Write reports from saved JSON; compare two.")
@click.argument("documents", nargs=-1, type=click.Path(path_type=Path), metavar="JSON [JSON]")
@click.option("--all", "show_all", is_flag=True, help="Show every parameter, not only the worst.")
@output_options
def report(documents: tuple[Path, ...], show_all: bool, form: str, outputs: tuple[Path, ...]) -> int:
    """Writes any report from a document that `--output FILE.json` saved; two documents stand side by side.

    The exit code is that of what was saved, of the later document where there are two.

    \b
      gaverify report verdict.json --output page.html
      gaverify report before.json after.json
    """
    if not 1 <= len(documents) <= 2:
        raise click.UsageError(
            "name one JSON document to show, or two to compare: `gaverify report before.json after.json`"
        )
    _check(documents, form, outputs)
    whole = _read(documents, show_all)
    _show(whole, form, outputs)
    return whole.code


def _check(documents: tuple[Path, ...], form: str, outputs: tuple[Path, ...]) -> None:
    from gaverify.report import format_for

    check_outputs(outputs)
    sources = {os.path.realpath(path) for path in documents}
    problems = [
        f"`{path}` would overwrite the document that it is made of"
        for path in outputs
        if os.path.realpath(path) in sources
    ]
    if len(documents) == 2:
        asked = dict.fromkeys([form, *(format_for(path).name for path in outputs)])
        known = ", ".join(_SIDE_BY_SIDE)
        problems += [
            f"`{name}` shows one run; two side by side are {known}" for name in asked if name not in _SIDE_BY_SIDE
        ]
    if problems:
        raise SpecError(problems)


def _read(documents: tuple[Path, ...], show_all: bool) -> Report:
    from gaverify.report.documents.reading import read_report

    found, problems = [], []
    for path in documents:
        try:
            found.append(read_report(path))
        except SpecError as error:
            problems += [f"`{error.source}` {problem}" for problem in error.problems]
    if len(found) == 2:
        empty = [path for path, report in zip(documents, found, strict=True) if not report.answers]
        problems += [f"`{path}` holds errors alone and no answer to compare" for path in empty]
    if problems:
        raise SpecError(problems)
    last = found[-1]
    before = found[0].answers if len(found) == 2 else ()
    return replace(last, show_all=show_all, before=before)


def _show(whole: Report, form: str, outputs: tuple[Path, ...]) -> None:
    from gaverify.report import format_named, print_report, write_all

    write_all(whole, outputs)
    if form == "text":
        print_report(whole)
    else:
        click.echo(format_named(form).render(whole), nl=False)
