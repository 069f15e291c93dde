"""`gaverify audit`: the user's own training script, unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gaverify.cli.audit_files import options_files, read_options
from gaverify.cli.audit_words import number, settings_of, whole
from gaverify.cli.failures import Invocation, failure_message, report_failure
from gaverify.cli.progress import DelayedProgress
from gaverify.cli.showing import check_outputs, exit_code_of, output_options, show, strict_option
from gaverify.errors import SpecError

if TYPE_CHECKING:
    from gaverify.audit.request import Request
    from gaverify.records.audit_report import AuditReport
    from gaverify.spec.accepting import Project

_Command = TypeVar("_Command", bound=Callable[..., Any])
_UPDATES, _TIMEOUT = 2, 3600.0


def _repeated(option: str, name: str, metavar: str, text: str) -> Callable[[_Command], _Command]:
    return click.option(option, name, metavar=metavar, multiple=True, help=text)


@click.command(short_help="Check a training script, unchanged.", context_settings={"ignore_unknown_options": False})
@click.argument("script", metavar="SCRIPT", required=False)
@click.argument("arguments", metavar="[-- ARGS]", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "module", metavar="MODULE", help="Run `python -m MODULE` in place of a script.")
@click.option("--full", metavar='"ARGS"', help="Arguments of the full-batch run alone.")
@click.option("--accumulated", metavar='"ARGS"', help="Arguments of the accumulated run alone.")
@click.option("--full-script", metavar="FILE", help="Another script for the full-batch run.")
@_repeated("--full-env", "full_env", "K=V", "A variable of the full-batch run's environment; repeatable.")
@_repeated("--accumulated-env", "accumulated_env", "K=V", "The same for the accumulated run.")
@_repeated("--full-set", "full_set", "NAME=VALUE", "A constant or default in the source of the full-batch run.")
@_repeated("--accumulated-set", "accumulated_set", "NAME=VALUE", "The same for the accumulated run.")
@_repeated("--set", "both_set", "NAME=VALUE", "For every run; NAME may be `FILE:key` of a configuration file.")
@click.option("--seed", metavar="N", help="Seed Python, NumPy and torch before the script starts.")
@click.option("--updates", metavar="M", help=f"Optimizer updates to record.  [{_UPDATES}]")
@click.option("--steps", metavar="K", help="Backward passes that each update should have.  [found out]")
@click.option("--events-only", is_flag=True, help="One run, the order of its calls alone; with --updates 0 to its end.")
@click.option("--tail", is_flag=True, help="Also audit epochs that end with a short window.")
@click.option("--timeout", metavar="S", help=f"Seconds until a run is ended.  [{_TIMEOUT:g}]")
@click.option("--ranks", metavar="R", help="Run the accumulated run in R processes, as torchrun would.")
@click.option("--full-ranks", metavar="R", help="The full-batch run as well, for a script that seeds by rank.")
@click.option("--launcher", metavar='"WORDS"', help="The command that starts the accumulated run, such as torchrun's.")
@click.option("--full-launcher", metavar='"WORDS"', help="The same for the full-batch run.  [one process]")
@click.option("--in-place", is_flag=True, help="Let the runs change files, as the script does on its own.")
@click.option("--keep", metavar="DIR", help="Keep the runs' records in a new folder.")
@click.option("--from", "kept", metavar="DIR", help="Report again from kept records; runs nothing.")
@click.option("--all", "show_all", is_flag=True, help="Show every parameter, not only the worst.")
@strict_option
@output_options
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def audit(kept: str | None, show_all: bool, strict: bool, form: str, outputs: tuple[Path, ...], **given: Any) -> int:
    """Runs SCRIPT with a large batch and with accumulation, and compares what reaches the optimizer.

    ARGS behind `--` go to every run. The script is stopped after M updates.

    \b
      gaverify audit train.py --full "--batch-size 8 --accum 1" \\
          --accumulated "--batch-size 2 --accum 4" -- --data d/
      gaverify audit train.py --full-set BATCH=8 --accumulated-set BATCH=2 \\
          --accumulated-set ACCUM=4
      gaverify audit audit.toml                  # these options in a file; or folders
      gaverify audit -m package.train --events-only -- --accum 4
    """
    from gaverify.acceptance import settled
    from gaverify.spec.accepting import project_settings

    project = project_settings()
    if kept is None and given["module"] is None:
        files = options_files(filter(None, (given["script"], *given["arguments"])))
        if files:
            _check_only_files(given)
            check_outputs(outputs)
            return _audit_files(files, project, form, outputs, show_all=show_all, strict=strict)
    request = None if kept is not None else _request(**given)
    if kept is not None:
        _check_alone(given)
    check_outputs(outputs)
    report = _audited(request) if request is not None else _again(kept or "")
    report = settled(report, (), project, strict=strict)
    show([report], form, outputs, show_all=show_all)
    return report.exit_code


def _named(given: dict[str, Any]) -> list[str]:
    """The options among what the command was given, as people write them; not the script."""
    names = {"both_set": "--set", "arguments": "arguments", "module": "-m"}
    return [names.get(name, f"--{name.replace('_', '-')}") for name in given if given[name] and name != "script"]


def _check_only_files(given: dict[str, Any]) -> None:
    """Raises where options of an audit stand beside files that hold them."""
    also = _named({**given, "arguments": ()})
    if also:
        raise SpecError(f"the options of these audits stand in their files; leave out {', '.join(also)}")


def _audit_files(
    files: Sequence[Path], project: Project, form: str, outputs: Sequence[Path], *, show_all: bool, strict: bool
) -> int:
    """Audits one file after the other; one that cannot be audited is an error of the report and stops no other."""
    from gaverify.acceptance import settled

    invocation = click.get_current_context().find_object(Invocation) or Invocation()
    reports: list[AuditReport] = []
    errors: list[tuple[str, str]] = []
    codes: list[int] = []
    for file in files:
        try:
            options = read_options(file, audit.params)
            report = _audited(_request(**options.given))
        except SpecError as error:  # of options that stand in the file, wherever they were checked
            codes.append(report_failure(SpecError(error.problems, str(file)), invocation))
            errors += [(str(file), problem) for problem in error.problems]
            continue
        except (Exception, SystemExit) as error:  # Ctrl-C ends them all
            codes.append(report_failure(error, invocation, str(file)))
            errors.append((str(file), failure_message(error)))
            continue
        made = settled(report, options.accept, project, expect=options.expect, strict=strict)
        reports.append(replace(made, source=str(file)))
    show(reports, form, outputs, show_all=show_all, errors=errors)
    return max(codes, default=0) or exit_code_of(reports, project, strict=strict)


def _check_alone(given: dict[str, Any]) -> None:
    """Raises where `--from` stands beside what only a new audit could obey."""
    also = ([f"`{given['script']}`"] if given["script"] else []) + _named(given)
    if also:
        raise SpecError(f"--from reports again what was run before; leave out {', '.join(also)}")


def _request(
    script: str | None,
    arguments: tuple[str, ...],
    module: str | None,
    full: str | None,
    accumulated: str | None,
    updates: str | None,
    steps: str | None,
    events_only: bool,
    timeout: str | None,
    in_place: bool,
    keep: str | None,
    tail: bool,
    seed: str | None,
    ranks: str | None,
    full_ranks: str | None,
    launcher: str | None,
    full_launcher: str | None,
    full_script: str | None,
    **pairs: tuple[str, ...],
) -> Request:
    from gaverify.audit.request import Request, words

    problems: list[str] = []
    if module is not None and script is not None:
        arguments, script = (script, *arguments), None  # `-m MODULE -- ARGS`: the first word is no script
    if script is None and module is None:
        raise click.UsageError("nothing to audit: name the training script, SCRIPT, or a module with `-m`")
    own = {name for name in ("full_env", "accumulated_env", "full_set", "accumulated_set") if pairs[name]}
    if events_only and (full is not None or accumulated is not None or full_script is not None or own):
        problems.append(
            "--events-only makes one run: give its arguments behind `--` and its values with --set, "
            "not in --full or --accumulated"
        )
    plain = not events_only and full_script is None and not own
    if plain and full is None and accumulated is not None:
        problems.append("--full is missing: the arguments that make the large batch, without accumulation")
    if plain and accumulated is None and full is not None:
        problems.append("--accumulated is missing: the arguments that cut the same batch into micro-batches")
    parts = []
    texts = (full, accumulated, launcher, full_launcher)
    for option, text in zip(("--full", "--accumulated", "--launcher", "--full-launcher"), texts, strict=True):
        try:
            parts.append(words(text or "", option))
        except SpecError as error:
            problems += error.problems
            parts.append(())
        if text is not None and not text.strip() and "launcher" in option:
            problems.append(f'{option} is empty; write a command, such as {option} "torchrun --nproc-per-node 2"')
    settings = settings_of(full_script, pairs, problems)
    return Request(
        script=module or script or "",
        full=parts[0],
        accumulated=parts[1],
        common=arguments,
        module=module is not None,
        updates=whole("--updates", updates, problems, _UPDATES),
        events_only=events_only,
        steps=None if steps is None else whole("--steps", steps, problems, 1),
        timeout=number("--timeout", timeout, problems, float, _TIMEOUT, "a number of seconds; write `--timeout 600`"),
        full_setting=settings[0],
        accumulated_setting=settings[1],
        seed=None if seed is None else whole("--seed", seed, problems, 0),
        keep=keep,
        ranks=None if ranks is None else whole("--ranks", ranks, problems, 2),
        full_ranks=None if full_ranks is None else whole("--full-ranks", full_ranks, problems, 2),
        launcher=parts[2],
        full_launcher=parts[3],
        in_place=in_place,
        tail=tail,
        problems=tuple(problems),
    )


def _again(folder: str) -> AuditReport:
    from gaverify.audit.flow import audit_again

    return audit_again(folder)


def _audited(request: Request) -> AuditReport:
    from gaverify.audit.flow import audit as run

    with DelayedProgress(request.script) as progress:
        return run(request, progress.report)
