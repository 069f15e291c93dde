"""The end of every command: writes the report files, then prints to stdout, then tells the CI service."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gaverify.cli.streams import INTERNAL, INTERRUPTED, USAGE, Failure, Invocation, say

if TYPE_CHECKING:
    from gaverify.records.audit_report import AuditReport
    from gaverify.records.verdict import Verdict
    from gaverify.report import Answer
    from gaverify.spec.accepting import Project


Command = TypeVar("Command", bound=Callable[..., Any])


def _known_format(_: click.Context, __: click.Parameter, word: str) -> str:
    if word == "text":  # what it is without the option; the table of formats need not load for it
        return word
    from gaverify.report import format_named

    return format_named(word).name


class _FormatOption(click.Option):
    """The option `--format`, whose help lists what the table of formats holds."""

    def make_metavar(self, ctx: click.Context | None = None) -> str:
        from gaverify.report.formats import FORMATS

        return "|".join(form.name for form in FORMATS)


def output_options(command: Command) -> Command:
    """Adds `--format`, `--output` and `--debug`, which every command that answers has."""
    command = debug_option(command)
    command = click.option(
        "--output",
        "outputs",
        multiple=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Also write a report; the ending decides the format; repeatable.",
    )(command)
    return click.option(
        "--format",
        "form",
        cls=_FormatOption,
        default="text",
        callback=_known_format,
        help="What stdout gets.  [text]",
    )(command)


debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")


def strict_option(command: Command) -> Command:
    """Adds `--strict`, which every command has that knows accepted divergences."""
    text = "Accepted divergences that are not found any more make it 1."
    return click.option("--strict", is_flag=True, help=text)(command)


def exit_code_of(
    answers: Sequence[Verdict | AuditReport], project: Project | None, failures: Sequence[Failure], *, strict: bool
) -> int:
    """The worst of the answers' exit codes; tells which of the project's entries accept nothing any more.

    One spec alone says nothing about entries that may fit another: they are judged where several answers are.
    """
    from gaverify.acceptance import unused

    stale = unused(answers, project) if project is not None and len(answers) > 1 else ()
    for sentence in stale:
        say(sentence, "warning")
    codes = [answer.exit_code for answer in answers] + [failure.code for failure in failures]
    return worst_of([*codes, 1] if stale and project is not None and (strict or project.strict) else codes)


def worst_of(codes: Sequence[int]) -> int:
    """The exit code that weighs most: an error more than any outcome, a divergence more than what was not decided."""
    return next((code for code in (INTERRUPTED, INTERNAL, USAGE, 1, 3) if code in codes), 0)


def check_outputs(outputs: Sequence[Path]) -> None:
    """Finds out before a long run whether its reports can be written."""
    if outputs:
        from gaverify.report import check_writable

        check_writable(outputs)


def show(
    answers: Sequence[Answer],
    form: str,
    outputs: Iterable[Path],
    *,
    show_all: bool = False,
    failures: Sequence[Failure] = (),
    printed: bool = False,
    quiet: bool = False,
) -> None:
    """Writes the files and what stdout still lacks: a summary where the answers are `printed`, else everything.

    `quiet` stands for a line for each answer, and no summary.

    Runs that failed are in the reports too: a CI that reads only the JUnit file must not take them for passed.
    """
    from gaverify import report

    answers, errors = [replace(answer, command=_command()) for answer in answers], [failure[:2] for failure in failures]
    try:  # files first: a reader of stdout that leaves must not cost them
        report.write_reports(answers, outputs, show_all, errors)
    finally:  # and a disk that filled up must not cost the table
        if form != "text":
            click.echo(report.render(answers, form, show_all, errors), nl=False)
        elif quiet:
            for answer in () if printed else answers:
                report.print_line(answer)
        elif printed:
            report.print_summary(answers, errors)
        elif len(answers) == 1 and not errors:
            report.print_answer(answers[0], show_all=show_all)
        elif answers:
            report.print_report(report.Report(tuple(answers), tuple(errors), show_all))
        _tell_github(answers, form, errors)


def _command() -> str:
    """Returns the command line of this call, which reports show so that a reader can run it again."""
    context = click.get_current_context(silent=True)
    invocation = context.find_object(Invocation) if context is not None else None
    return shlex.join(["gaverify", *invocation.words]) if invocation is not None else ""


def _tell_github(answers: Sequence[Answer], form: str, errors: Sequence[tuple[str, str]]) -> None:
    """Annotates the lines and appends to the job's summary where GitHub runs the job; nothing elsewhere."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    from gaverify import report

    if form == "text":  # any other format is a document, which lines behind it would spoil
        click.echo(report.render(answers, "github", errors=errors), nl=False)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with open(summary, "a", encoding="utf-8") as stream:
                stream.write(report.render(answers, "markdown", errors=errors))
        except OSError as error:
            say(f"the job's summary was not written: {error.strerror or error}", "warning")
