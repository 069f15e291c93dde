"""`gaverify run`: verify one problem, or every spec that was named."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gaverify.cli.failures import INTERNAL, USAGE, as_foreseen, say
from gaverify.cli.options import overrides_from, spec_options
from gaverify.cli.progress import DelayedProgress
from gaverify.errors import GaverifyError, SpecError
from gaverify.results import Outcome, Verdict

if TYPE_CHECKING:
    from gaverify.spec import Spec


@click.command(short_help="Compare accumulated with full-batch gradients.")
@click.argument("specs", nargs=-1, type=click.Path(path_type=Path))
@spec_options
@click.option("--all", "show_all", is_flag=True, help="Show every parameter, not only the worst.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="What stdout gets.  [text]")
@click.option(
    "--output", "outputs", multiple=True, metavar="FILE", type=click.Path(path_type=Path),
    help="Also write a report; the ending decides the format; repeatable.",
)  # fmt: skip
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def run(
    specs: tuple[Path, ...], show_all: bool, form: str, outputs: tuple[Path, ...], debug: bool, **words: Any
) -> int:
    """Compares the accumulated gradient with the full batch's, for a model or for SPECS.

    SPECS are TOML files and folders of them; options override every one.

    \b
      gaverify run --model mlp --steps 4
      gaverify run --model package.module:factory --weighting tokens
      gaverify run configs/ --output report.html
    """
    jobs = _jobs(specs, overrides_from(words))
    _check_outputs(outputs)
    verdicts, failures = _verify_all(jobs, echo=form == "text" and len(jobs) > 1, show_all=show_all, debug=debug)
    if verdicts:
        _report(verdicts, form, outputs, show_all, printed=form == "text" and len(jobs) > 1)
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
    if not outputs:
        return
    from gaverify.report import format_for

    problems = []
    for path in outputs:
        try:
            format_for(path)
        except SpecError as error:
            problems.extend(error.problems)
        folder = path.parent
        if path.is_dir():
            problems.append(f"--output {path}: is a folder; name a file in it")
        elif not folder.is_dir():
            problems.append(f"--output {path}: there is no folder `{folder}`; create it first")
        elif not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            problems.append(f"--output {path}: no permission to write there")
    if problems:
        raise SpecError(problems)


def _verify_all(
    jobs: Sequence[tuple[str, Spec]], *, echo: bool, show_all: bool, debug: bool
) -> tuple[list[Verdict], list[GaverifyError]]:
    """Verifies one spec after the other; one that fails is reported and does not stop the rest.

    With `echo` each table is printed as soon as it is there, so that a long run can be watched.
    """
    verdicts: list[Verdict] = []
    failures: list[GaverifyError] = []
    for source, spec in jobs:
        try:
            verdict = _verify_one(spec)
        except (Exception, SystemExit) as error:
            foreseen = as_foreseen(error)
            if foreseen is None or len(jobs) == 1:
                raise
            failures.append(foreseen)
            _say_failure(source, error, foreseen, debug=debug)
            continue
        verdicts.append(verdict)
        if echo:
            from gaverify.report import print_verdicts

            print_verdicts([verdict], show_all=show_all)
            sys.stdout.flush()
    if failures:
        say(f"{len(failures)} of {len(jobs)} specs could not be verified")
    return verdicts, failures


def _verify_one(spec: Spec) -> Verdict:
    # stdout is the report's: what the model's code prints goes to stderr. The import is inside as torch may warn.
    with redirect_stdout(sys.stderr), DelayedProgress(spec.model) as progress:
        from gaverify.verification import verify_spec

        return verify_spec(spec, progress=progress.report)


def _say_failure(source: str, error: BaseException, foreseen: GaverifyError, *, debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exception(error)
    say("\n".join(f"{source}: {line}" for line in str(foreseen).splitlines() or [type(error).__name__]))


def _report(
    verdicts: Sequence[Verdict], form: str, outputs: Sequence[Path], show_all: bool, *, printed: bool
) -> None:
    """Writes the files and what stdout still lacks: a summary where the tables are `printed`, else everything."""
    from gaverify import report

    if outputs:
        report.write_reports(verdicts, outputs, show_all)
    if form == "json":
        click.echo(report.render(verdicts, "json"))
    elif printed:
        report.print_summary(verdicts)
    else:
        report.print_verdicts(verdicts, show_all=show_all)


def _exit_code(verdicts: Sequence[Verdict], failures: Sequence[GaverifyError]) -> int:
    """The worst of what happened: an error, then divergent, then inconclusive; 0 only if all are equivalent."""
    if failures:
        return INTERNAL if any(error.exit_code == INTERNAL for error in failures) else USAGE
    outcomes = {verdict.outcome for verdict in verdicts}
    for outcome in (Outcome.DIVERGENT, Outcome.INCONCLUSIVE):
        if outcome in outcomes:
            return outcome.exit_code
    return Outcome.EQUIVALENT.exit_code
