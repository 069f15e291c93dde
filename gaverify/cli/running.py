"""`gaverify run`: verify one problem, or every spec that was named."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gaverify.cli.failures import Invocation, failure_message, report_failure
from gaverify.cli.options import overrides_from, spec_options
from gaverify.cli.progress import DelayedProgress
from gaverify.results import Outcome, Verdict

if TYPE_CHECKING:
    from gaverify.spec import Spec


class _Failure(NamedTuple):
    """A spec that could not be verified, and the exit code that it asks for."""

    source: str
    message: str
    code: int


@click.command(short_help="Compare accumulated with full-batch gradients.")
@click.argument("specs", nargs=-1, type=click.Path(path_type=Path))
@spec_options
@click.option("--all", "show_all", is_flag=True, help="Show every parameter, not only the worst.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="What stdout gets.  [text]")
@click.option(
    "--output", "outputs", multiple=True, metavar="FILE", type=click.Path(path_type=Path),
    help="Also write a report; the ending decides the format; repeatable.",
)  # fmt: skip
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
@click.pass_obj
def run(
    invocation: Invocation | None, /, specs: tuple[Path, ...], show_all: bool, form: str, outputs: tuple[Path, ...],
    **words: Any,
) -> int:  # fmt: skip
    """Compares the accumulated gradient with the full batch's, for a model or for SPECS.

    SPECS are TOML files and folders of them; options override every one.

    \b
      gaverify run --model mlp --steps 4
      gaverify run --model package.module:factory --weighting tokens
      gaverify run configs/ --output report.html
    """
    jobs = _jobs(specs, overrides_from(words))
    _check_outputs(outputs)
    echo = form == "text" and len(jobs) > 1
    verdicts, failures = _verify_all(jobs, invocation or Invocation(), echo=echo, show_all=show_all)
    _report(verdicts, [(failure.source, failure.message) for failure in failures], form, outputs, show_all, echo)
    return _exit_code(verdicts, failures)


def _jobs(paths: Sequence[Path], overrides: dict[str, Any]) -> list[tuple[str, Spec]]:
    from gaverify.spec import load_specs, parse_spec

    if paths:
        return [(str(path), spec) for path, spec in load_specs(paths, overrides)]
    if "model" not in overrides:
        raise click.UsageError("nothing to verify: give `--model NAME` (see `gaverify models`) or spec files")
    return [("command line", parse_spec({}, "command line", overrides))]


def _check_outputs(outputs: Sequence[Path]) -> None:
    """Finds out before a long run whether its reports can be written."""
    if outputs:
        from gaverify.report import check_writable

        check_writable(outputs)


def _verify_all(
    jobs: Sequence[tuple[str, Spec]], invocation: Invocation, *, echo: bool, show_all: bool
) -> tuple[list[Verdict], list[_Failure]]:
    """Verifies one spec after the other; one that fails is reported and does not stop the rest.

    With `echo` each table is printed as soon as it is there, so that a long run can be watched.
    """
    verdicts: list[Verdict] = []
    failures: list[_Failure] = []
    for source, spec in jobs:
        try:
            verdict = _verify_one(spec)
        except (Exception, SystemExit) as error:  # Ctrl-C goes on to `main`
            code = report_failure(error, invocation, source if len(jobs) > 1 else "")
            failures.append(_Failure(source, failure_message(error), code))
            continue
        verdicts.append(verdict)
        if echo:
            from gaverify.report import print_verdicts

            print_verdicts([verdict], show_all=show_all)
            click.echo()  # before the next table or the summary; flushes
    return verdicts, failures


def _verify_one(spec: Spec) -> Verdict:
    # stdout is the report's: what the model's code prints goes to stderr. The import is inside as torch may warn.
    with redirect_stdout(sys.stderr), DelayedProgress(spec.model) as progress:
        from gaverify.verification import verify_spec

        return verify_spec(spec, progress=progress.report)


def _report(
    verdicts: Sequence[Verdict],
    errors: Sequence[tuple[str, str]],
    form: str,
    outputs: Sequence[Path],
    show_all: bool,
    printed: bool,
) -> None:
    """Writes the files and what stdout still lacks: a summary where the tables are `printed`, else everything.

    Specs that failed are in the reports too: a CI that reads only the JUnit file must not take them for passed.
    """
    from gaverify import report

    try:
        if outputs:  # first: a reader of stdout that leaves must not cost the files
            report.write_reports(verdicts, outputs, show_all, errors)
    finally:  # and a disk that filled up must not cost the table
        if form == "json":
            click.echo(report.render(verdicts, "json", show_all, errors), nl=False)
        elif printed:
            report.print_summary(verdicts, errors)
        elif verdicts:
            report.print_verdicts(verdicts, show_all=show_all)


def _exit_code(verdicts: Sequence[Verdict], failures: Sequence[_Failure]) -> int:
    """The worst of what happened: a fault, an error, divergent, inconclusive; 0 only if all are equivalent."""
    if failures:
        return max(failure.code for failure in failures)
    outcomes = {verdict.outcome for verdict in verdicts}
    for outcome in (Outcome.DIVERGENT, Outcome.INCONCLUSIVE):
        if outcome in outcomes:
            return outcome.exit_code
    return Outcome.EQUIVALENT.exit_code
