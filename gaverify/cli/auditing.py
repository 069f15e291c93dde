"""`gaverify audit`: the user's own training script, unchanged."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gaverify.cli.progress import DelayedProgress
from gaverify.errors import SpecError

if TYPE_CHECKING:
    from gaverify.audit.answer import AuditReport
    from gaverify.audit.request import Request

_UPDATES, _TIMEOUT = 2, 3600.0


@click.command(short_help="Check a training script, unchanged.", context_settings={"ignore_unknown_options": False})
@click.argument("script", metavar="SCRIPT", required=False)
@click.argument("arguments", metavar="[-- ARGS]", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "module", metavar="MODULE", help="Run `python -m MODULE` in place of a script.")
@click.option("--full", metavar='"ARGS"', help="Arguments of the full-batch run alone.")
@click.option("--accumulated", metavar='"ARGS"', help="Arguments of the accumulated run alone.")
@click.option("--updates", metavar="M", default=str(_UPDATES), help=f"Optimizer updates to record.  [{_UPDATES}]")
@click.option("--steps", metavar="K", help="Backward passes that each update should have.  [found out]")
@click.option("--events-only", is_flag=True, help="One run, the order of its calls alone; with --updates 0 to its end.")
@click.option("--timeout", metavar="S", default=f"{_TIMEOUT:g}", help=f"Seconds until a run is ended.  [{_TIMEOUT:g}]")
@click.option("--all", "show_all", is_flag=True, help="Show every parameter, not only the worst.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="What stdout gets.  [text]")
@click.option(
    "--output", "outputs", multiple=True, metavar="FILE", type=click.Path(path_type=Path),
    help="Also write a report; the ending decides the format; repeatable.",
)  # fmt: skip
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def audit(
    script: str | None, arguments: tuple[str, ...], module: str | None, full: str | None, accumulated: str | None,
    updates: str, steps: str | None, events_only: bool, timeout: str, show_all: bool, form: str,
    outputs: tuple[Path, ...],
) -> int:  # fmt: skip
    """Runs SCRIPT with a large batch and with accumulation, and compares what reaches the optimizer.

    ARGS behind `--` go to every run. The script is stopped after M updates.

    \b
      gaverify audit train.py --full "--batch-size 8 --accum 1" \\
          --accumulated "--batch-size 2 --accum 4" -- --data d/
      gaverify audit -m package.train --events-only -- --accum 4
    """
    request = _request(script, arguments, module, full, accumulated, updates, steps, events_only, timeout)
    if outputs:
        from gaverify.report import check_writable

        check_writable(outputs)
    report = _audited(request)
    _show(report, form, outputs, show_all)
    return report.outcome.exit_code


def _request(
    script: str | None, arguments: tuple[str, ...], module: str | None, full: str | None, accumulated: str | None,
    updates: str, steps: str | None, events_only: bool, timeout: str,
) -> Request:  # fmt: skip
    from gaverify.audit.request import Request, words

    problems: list[str] = []
    if module is not None and script is not None:
        arguments, script = (script, *arguments), None  # `-m MODULE -- ARGS`: the first word is no script
    if script is None and module is None:
        raise click.UsageError("nothing to audit: name the training script, SCRIPT, or a module with `-m`")
    if events_only and (full is not None or accumulated is not None):
        problems.append("--events-only makes one run: give its arguments behind `--`, not in --full or --accumulated")
    if not events_only and full is None and accumulated is not None:
        problems.append("--full is missing: the arguments that make the large batch, without accumulation")
    if not events_only and accumulated is None and full is not None:
        problems.append("--accumulated is missing: the arguments that cut the same batch into micro-batches")
    parts = []
    for option, text in (("--full", full), ("--accumulated", accumulated)):
        try:
            parts.append(words(text or "", option))
        except SpecError as error:
            problems += error.problems
            parts.append(())
    return Request(
        module or script or "", parts[0], parts[1], arguments, module is not None,
        _whole("--updates", updates, problems, _UPDATES), events_only,
        None if steps is None else _whole("--steps", steps, problems, 1), _seconds(timeout, problems), tuple(problems),
    )  # fmt: skip


def _whole(option: str, word: str, problems: list[str], instead: int) -> int:
    try:
        return int(word)
    except ValueError:
        problems.append(f"{option} {word!r} is not a whole number; write `{option} {instead}`")
        return instead


def _seconds(word: str, problems: list[str]) -> float:
    try:
        return float(word)
    except ValueError:
        problems.append(f"--timeout {word!r} is not a number of seconds; write `--timeout 600`")
        return _TIMEOUT


def _audited(request: Request) -> AuditReport:
    from gaverify.audit.flow import audit as run

    with DelayedProgress(request.script) as progress:
        return run(request, progress.report)


def _show(report: AuditReport, form: str, outputs: Sequence[Path], show_all: bool) -> None:
    from gaverify.audit.printing import print_report, render_report
    from gaverify.report import format_for
    from gaverify.report.files import write_whole

    try:
        for path in outputs:  # first: a reader of stdout that leaves must not cost the files
            write_whole(path, render_report(report, format_for(path), show_all))
    finally:  # and a disk that filled up must not cost the table
        if form == "json":
            click.echo(report.to_json())
        else:
            print_report(report, sys.stdout, show_all)
