"""The end of every command: writes report files, prints to stdout, tells the CI service; and `gaverify report`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from gaverify.acceptance import describe_unused_entries
from gaverify.cli.streams import Failure, Invocation, note_answers, say, tell
from gaverify.errors import INTERRUPTED, SpecError, worst_exit_code

if TYPE_CHECKING:
    from gaverify.records.answers import Answer
    from gaverify.records.audit_report import Audit
    from gaverify.records.verdict import Verdict
    from gaverify.report import Report
    from gaverify.spec.project import Project


Command = TypeVar("Command", bound=Callable[..., Any])


def _known_format(_: click.Context, __: click.Parameter, word: str) -> str:
    if word == "text":  # what it is without the option; the table of formats need not load for it
        return word
    from gaverify.report import format_named

    return format_named(word).name


def _set_colours(context: click.Context, _: click.Parameter, word: str | None) -> None:
    """Says by the variables that the reports read, until the command is over, whether there are colours."""
    if word is None or context.resilient_parsing:
        return
    wanted = {"always": {"FORCE_COLOR": "1"}, "never": {"NO_COLOR": "1"}, "auto": {}}[word]
    # Both go: one that the shell has set would contradict the option.
    before = {name: os.environ.pop(name, None) for name in ("FORCE_COLOR", "NO_COLOR")}
    os.environ.update(wanted)

    def restore() -> None:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    context.call_on_close(restore)


class _FormatOption(click.Option):
    """The option `--format`, whose help lists what the table of formats holds."""

    def make_metavar(self, ctx: click.Context | None = None) -> str:
        from gaverify.report.formats import FORMATS

        return "|".join(form.name for form in FORMATS)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offers the formats."""
        from gaverify.report.formats import FORMATS

        return [CompletionItem(form.name) for form in FORMATS if form.name.startswith(incomplete)]


def output_options(command: Command) -> Command:
    """Adds `--format`, `--output`, `--color` and `--debug`, which every command that answers has."""
    command = debug_option(command)
    command = click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        expose_value=False,
        callback=_set_colours,
        help="Colours on stdout.  [auto]",
    )(command)
    command = click.option(
        "-o",
        "--output",
        "outputs",
        multiple=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Also write a report; its extension selects the format; repeatable.",
    )(command)
    return click.option(
        "--format",
        "form",
        cls=_FormatOption,
        default="text",
        callback=_known_format,
        help="Format of stdout.  [text]",
    )(command)


debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")


def strict_option(more: str = "") -> Callable[[Command], Command]:
    """Adds `--strict`, which every command has that knows accepted divergences.

    Args:
        more: The help's words for other things that fail then.
    """
    text = f"Exit 1 if a divergence that an `accept` entry of a TOML file allows no longer occurs{more}."
    return click.option("--strict", is_flag=True, help=text)


def exit_code_of(
    answers: Sequence[Verdict | Audit],
    project: Project | None,
    failures: Sequence[Failure],
    skipped: Sequence[Failure] = (),
    *,
    strict: bool,
) -> int:
    """The worst of the answers' exit codes; tells which of the project's entries accept nothing any more.

    One spec alone says nothing about entries that may fit another: they are judged where several answers are. Skipped
    specs count only where nothing else was asked for, or by their place among the failures.
    """
    if skipped and not answers and not failures:
        say("nothing was compared: every spec was skipped")
        failures = skipped
    stale = describe_unused_entries(answers, project) if project is not None and len(answers) > 1 else ()
    for sentence in stale:
        say(sentence, "warning")
    # An answer with exit code 0 must not hide a spec that could not run.
    codes = [answer.exit_code for answer in answers] + [failure.code for failure in failures]
    return worst_exit_code([*codes, 1] if stale and project is not None and (strict or project.strict) else codes)


def check_outputs(outputs: Sequence[Path]) -> None:
    """Finds out before a long run whether its reports can be written."""
    # The room of reports takes a moment to import, which most calls can do without.
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
    skipped: Sequence[Failure] = (),
    exit_code: int = -1,
    printed: bool = False,
    quiet: bool = False,
    slowest: int = 0,
    only_diffs: bool = False,
) -> None:
    """Writes the files and what stdout still lacks: a summary where the answers are `printed`, else everything.

    `quiet` stands for a line for each answer, and no summary; with `only_diffs` text is the diffs of patches, and they
    come last in any case. Of the answers that took longest `slowest` are listed.

    Runs that failed or were skipped are in the reports too: a CI that reads only the JUnit file must not take them for
    passed.
    """
    from gaverify import report

    note_answers(len(answers))
    context = click.get_current_context(silent=True)
    invocation = context.find_object(Invocation) if context is not None else None
    # the words of the call stand in reports, so that a reader can run it again
    command = shlex.join(["gaverify", *invocation.words]) if invocation is not None else ""
    shown_report = report.Report(
        tuple(replace(answer, command=command) for answer in answers),
        tuple(report.NoAnswer(each.source, each.message, each.position) for each in failures),
        tuple(report.NoAnswer(each.source, each.message, each.position) for each in skipped),
        show_all=show_all,
        exit_code=exit_code,
        started=invocation.started if invocation is not None else "",
    )
    try:  # files first: a reader of stdout that leaves must not cost them
        outputs = tuple(outputs)
        if exit_code == INTERRUPTED:  # half an answer replaces no whole one
            outputs = tuple(path for path in outputs if not path.exists())
        report.write_all(shown_report, outputs)
        for path in outputs:
            tell(f"gaverify: wrote {path}")
    finally:  # and a disk that filled up must not cost the table
        if form != "text":
            click.echo(report.format_named(form).render(shown_report), nl=False)
        elif only_diffs:
            report.print_diffs(shown_report, alone=True)
        else:
            _show_text(shown_report, printed=printed, quiet=quiet, slowest=slowest)
        if form != "text" or only_diffs:
            _tell_patches(shown_report)
        _tell_github(shown_report, annotates=form == "text" and not only_diffs)


def _show_text(made: Report, *, printed: bool, quiet: bool, slowest: int) -> None:
    """Prints what stdout still lacks of a report; diffs come last, where a pipe to `git apply` finds them."""
    from gaverify import report

    if quiet:
        for answer in () if printed else made.answers:
            report.print_line(answer)
    elif printed:
        report.print_summary(made)
    elif not made.is_list:
        report.print_answer(made.answers[0], show_all=made.show_all)
    elif made.answers:
        report.print_report(made)
    if slowest and made.answers:
        report.print_slowest(made, slowest)
    report.print_diffs(made)


def _tell_patches(made: Report) -> None:
    """Tells on stderr what became of the patches, where stdout has no text that says it."""
    for answer in made.answers:
        if answer.patch_refused:
            tell(f"gaverify: {'no patch' if answer.patch is None else 'not written'}: {answer.patch_refused}")
        elif answer.patch_written:
            tell(f"gaverify: written: {answer.patch_written}")


def _tell_github(made: Report, *, annotates: bool) -> None:
    """Annotates the lines and appends to the job's summary where GitHub runs the job; nothing elsewhere."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    from gaverify import report

    if annotates:  # a document, or a diff alone, would be spoilt by lines behind it
        click.echo(report.format_named("github").render(made), nl=False)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with open(summary, "a", encoding="utf-8") as stream:
                stream.write(report.format_named("markdown").render(made) + report.suggestions_text(made))
        except OSError as error:
            say(f"the job's summary was not written: {error.strerror or error}", "warning")


# `gaverify report`: a saved document as any other report.


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
    return full_report.exit_code


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
    from gaverify.report import format_named, print_diffs, print_report, write_all

    write_all(whole, outputs)
    if form == "text":
        print_report(whole)
        print_diffs(whole)
    else:
        click.echo(format_named(form).render(whole), nl=False)
