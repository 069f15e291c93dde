"""`gaverify run`: verify one problem, or every spec that was named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gaverify.acceptance import mark_accepted
from gaverify.cli.choosing import (
    COMMAND_LINE,
    Choice,
    Job,
    choose,
    leave_out_successes,
    list_jobs,
    name_width,
    read_expression,
    remember,
)
from gaverify.cli.listing import complete_notes
from gaverify.cli.options import GroupedCommand, add_options, complete_specs, names_a_model
from gaverify.cli.patching import Wish, patch_options, settle_patch, try_patch
from gaverify.cli.showing import check_outputs, exit_code_of, output_options, show, strict_option
from gaverify.cli.streams import (
    DelayedProgress,
    Failure,
    Invocation,
    SeveralProgress,
    failures_of,
    guests,
    note_answers,
    pause_collector,
    report_failure,
    say,
)
from gaverify.cli.workers import needs_worker, verify_in_workers
from gaverify.errors import INTERRUPTED, BrokenTorch, MissingPackage, SpecError
from gaverify.launched import await_first, is_first, read_launcher
from gaverify.records.numbers import count_text
from gaverify.spec import OPTIONS, Spec, parse_spec, read_specs
from gaverify.spec.entries import code_problems
from gaverify.spec.options import option, options_of, pop_values, read_words
from gaverify.spec.project import Project, project_settings
from gaverify.spec.values import FLAG, whole

if TYPE_CHECKING:
    from gaverify.records.verdict import Verdict


_PrintEach = Callable[["Verdict"], None]


@dataclass(frozen=True)
class RunPlan:
    """How a list of specs is worked through."""

    maxfail: int | None = option(whole(1, "N"), "Stop after N failures.", None, 1)
    """After so many that fail no other is begun; None for no limit."""
    jobs: int = option(whole(1, "N"), "Specs to run at the same time.  [1]", 1, 4, flags="-j --jobs")
    """How many are verified at a time."""
    last_failed: bool = option(
        FLAG, "Run only the specs that failed last; all, if none did.", False, True, flags="--lf --last-failed"
    )
    """Whether only what failed last is begun."""
    only_list: bool = option(FLAG, "List the specs that would run, and run none.", False, True, flags="--list")
    """Whether nothing is begun."""
    durations: int | None = option(whole(1, "N"), "Show the N slowest specs.", None, 3)
    """How many of the slowest are listed at the end; None for none."""
    strict: bool = False
    """Stale entries fail, and specs that would be skipped."""
    quiet: bool = False
    """Say nothing of what is begun where there is no terminal."""
    row_width: int | None = None
    """Columns of the names where each run is a row; None: runs have no rows."""
    wish: Wish = field(default_factory=Wish)
    """The options about patches."""


_PLAN_OPTIONS = options_of(RunPlan)


@dataclass
class _Results:
    """The results of the runs of a call so far."""

    verdicts: list[Verdict] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[Failure] = field(default_factory=list)


@click.command(cls=GroupedCommand, short_help="Compare accumulated with full-batch gradients.")
@click.argument(
    "specs", nargs=-1, metavar="[MODEL|SPEC|FOLDER]...", type=click.Path(path_type=Path), shell_complete=complete_specs
)
@add_options(OPTIONS.values())
@click.option("-k", "expression", metavar="EXPRESSION", help="Run only specs whose names match: 'cnn and not slow'.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Skip matching files in folders; repeatable.")
@click.option("-x", "stop_at_first", is_flag=True, help="Stop after the first failure.")
@add_options(_PLAN_OPTIONS.values())
@click.option(
    "--select",
    multiple=True,
    metavar="CODE",
    help="Show only notes with this code; repeatable.",
    shell_complete=complete_notes,
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="CODE",
    help="Hide notes with this code; repeatable.",
    shell_complete=complete_notes,
)
@click.option("-q", "--quiet", is_flag=True, help="One line per model or spec; with --diff or --fix only the diff.")
@click.option("-v", "--verbose", "--all", "show_all", is_flag=True, help="Show every parameter, not only the worst.")
@patch_options
@strict_option(", and 2 if a spec would be skipped for want of a package")
@output_options
@click.pass_obj
def run(
    invocation: Invocation | None,
    /,
    specs: tuple[Path, ...],
    expression: str | None,
    exclude: tuple[str, ...],
    stop_at_first: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    diff: bool,
    fix: bool,
    unsafe: bool,
    quiet: bool,
    show_all: bool,
    strict: bool,
    form: str,
    outputs: tuple[Path, ...],
    **words: Any,
) -> int:
    """Compares the accumulated gradient with the gradient of the full batch.

    MODEL is a built-in or `file.py:factory`, as for `--model`. SPEC is a TOML file of these options, which
    `gaverify init` writes, and FOLDER a folder of them. Options on the command line override those in specs.

    \b
      gaverify run mlp --steps 4
      gaverify run my_model.py:factory --weighting tokens
      gaverify run configs/ -j 4 -o report.html
    """
    problems: list[str] = []
    overrides = read_words({**OPTIONS, **_PLAN_OPTIONS}, words)
    wish = Wish(diff, fix, unsafe)
    wish.check()
    plan = RunPlan(strict=strict, quiet=quiet, wish=wish, **pop_values(_PLAN_OPTIONS, overrides, problems))
    # The file would hold what an earlier call found.
    problems += ["--list: runs nothing and writes no report; leave out -o"] if plan.only_list and outputs else []
    if problems:
        raise SpecError(problems)
    if stop_at_first:
        plan = replace(plan, maxfail=1)
    invocation = invocation or Invocation()
    if not is_first():  # rank 0 reports for all
        form, outputs = "text", ()
    check_outputs(outputs)
    results = _Results()
    print_each: _PrintEach | None = None
    project: Project | None = None
    try:
        choice = read_expression(expression) if expression is not None else None
        project = _project_for(select, ignore)
        plan = replace(plan, strict=strict or project.strict)
        # A report that was asked for stands in place of those that the project writes by default.
        if not outputs and form == "text" and is_first():
            outputs = tuple(map(Path, project.outputs))
            check_outputs(outputs)
        found_jobs = _jobs(specs, overrides, project, exclude, choice, plan)
        _refuse_patch(found_jobs, plan)
        if plan.only_list:
            return list_jobs(found_jobs)
        if form == "text" and is_first() and (len(found_jobs) > 1 or quiet) and not (quiet and wish.asks):
            # A single answer is left to `show`: there is nothing to wait for behind it.
            width = name_width(found_jobs)
            plan = replace(plan, row_width=width if quiet else None)
            print_each = partial(_print_row, width) if quiet else partial(_print_table, show_all)
        _verify_all(found_jobs, invocation, results, project, print_each, plan)
    except SpecError as error:  # no spec can run; a report of an earlier call must not stand for this one
        code = report_failure(error, invocation)
        results.failures += [Failure(error.source, sentence, code) for sentence in error.problems]
    code = exit_code_of(results.verdicts, project, results.failures, results.skipped, strict=strict)
    if is_first():
        show(
            results.verdicts,
            form,
            outputs,
            show_all=show_all,
            failures=results.failures,
            skipped=results.skipped,
            exit_code=code,
            printed=print_each is not None,
            quiet=quiet,
            slowest=plan.durations or 0,
            only_diffs=quiet and wish.asks,
        )
    await_first(code)
    return code


def _refuse_patch(jobs: Sequence[Job], plan: RunPlan) -> None:
    """Raises if a patch is asked for that no job can have; a folder may hold others that can."""
    if not plan.wish.asks:
        return
    from gaverify.loading.importing import NameKind, kind_of

    if plan.only_list:
        plan.wish.refuse("--list runs nothing, and a patch is tried in a run")
    if read_launcher() is not None:
        plan.wish.refuse("a launcher has started this process, and a patch is tried in another one")
    specs = [spec for source, spec in jobs if isinstance(spec, Spec) and source == COMMAND_LINE]
    # A name that is wrong gets its own sentence when its turn comes.
    specs = [spec for spec in specs if _name_error(spec) is None]
    if specs and all(kind_of(spec.model) is NameKind.BUILTIN for spec in specs):
        plan.wish.refuse(f"`{specs[0].model}` is a built-in model of gaverify, and a patch changes a file of yours")


def _project_for(select: tuple[str, ...], ignore: tuple[str, ...]) -> Project:
    """Returns what `pyproject.toml` says, with the notes that the command line wants."""
    problems = [f"--select: {text}" for text in code_problems(select)]
    problems += [f"--ignore: {text}" for text in code_problems(ignore)]
    if problems:
        raise SpecError(problems)
    project = project_settings()
    return replace(project, select=select or project.select, ignore=(*project.ignore, *ignore))


def _jobs(
    paths: Sequence[Path],
    overrides: dict[str, Any],
    project: Project,
    exclude: Sequence[str],
    choice: Choice | None,
    plan: RunPlan,
) -> list[Job]:
    """Returns each source that is chosen with its spec, or with what is wrong with it."""
    if not paths and "model" not in overrides:
        paths = tuple(map(Path, project.paths))
    if not paths and "model" not in overrides:
        raise click.UsageError("nothing to verify: name a model (see `gaverify models`) or spec files")
    models = [] if "model" in overrides else list(filter(names_a_model, paths))
    # Without a path the model is among the overrides, else each path is a model of its own.
    settings = [overrides] if not paths else [{**overrides, "model": str(model)} for model in models]
    files = [path for path in paths if path not in models]
    entries = read_specs(files, overrides, project, (*exclude, *project.exclude)) if files else ()
    jobs: list[Job] = []
    jobs += [(COMMAND_LINE, parse_spec({}, COMMAND_LINE, options, project)) for options in settings]
    jobs += [(str(path), entry) for path, entry in entries]
    chosen = jobs if choice is None else choose(jobs, choice)
    return leave_out_successes(chosen) if plan.last_failed else chosen


def _verify_all(
    jobs: Sequence[Job],
    invocation: Invocation,
    results: _Results,
    project: Project,
    print_each: _PrintEach | None,
    plan: RunPlan,
) -> None:
    """Verifies specs into `results`, in their order; one that fails does not stop the rest.

    `print_each` gets each verdict as soon as it and those before it are there, so that a long run can be watched.
    Ctrl-C ends the list: what was not verified by then is a failure. A spec that lacks a package is skipped, unless
    that is strict; a model that the command line names has to run.
    """
    failed = 0
    with closing(_answers(jobs, plan, debug=invocation.debug)) as answers:
        for at, (source, spec) in enumerate(jobs):
            try:
                if isinstance(spec, SpecError):
                    raise spec
                verdict = try_patch(_settle(next(answers), spec, project, source, plan), spec, plan.wish)
                verdict = settle_patch(verdict, plan.wish)
            except BaseException as error:
                if isinstance(error, MissingPackage) and source != COMMAND_LINE and not plan.strict:
                    results.skipped.append(Failure(source, str(error), error.exit_code, at))
                    _tell_skipped(results.skipped[-1], plan.row_width)
                    continue
                ended = failures_of(error, source, invocation, alone=len(jobs) == 1, row_width=plan.row_width)
                if ended[0].code == INTERRUPTED:
                    why = "interrupted before there was a verdict"
                    missed = enumerate(jobs[at:], at)
                    results.failures += [Failure(source, why, INTERRUPTED, number) for number, (source, _) in missed]
                    return
                results.failures += [failure._replace(position=at) for failure in ended]
                failed += 1
                remember(source, failed=True)
            else:
                results.verdicts.append(verdict)
                note_answers(len(results.verdicts))
                failed += verdict.exit_code != 0
                remember(source, failed=verdict.exit_code != 0)
                if print_each is not None:
                    print_each(verdict)
            if failed == plan.maxfail and at + 1 < len(jobs):
                remaining = count_text(len(jobs) - at - 1, "spec")
                say(f"{count_text(failed, 'failure')}; {remaining} after {source} not verified", "stopped")
                return


def _answers(jobs: Sequence[Job], plan: RunPlan, *, debug: bool) -> Generator[Any, None, None]:
    """Yields the verdict of each job that is a spec, or what it ended with, in the order of the jobs."""
    specs = [spec for _, spec in jobs if isinstance(spec, Spec)]
    count = min(plan.jobs, len(specs))
    # ranks of a launcher have to stay the processes that it started, and end windows that hang themselves
    in_workers = read_launcher() is None and (count > 1 or any(needs_worker(spec) for spec in specs))
    if not in_workers:
        for number, spec in enumerate(specs):
            answer: Any
            try:
                answer = _verify_one(spec, number, len(specs), quiet=plan.quiet)
            except BaseException as error:
                answer = error
            yield answer
        return
    checked = [_name_error(spec) for spec in specs]
    numbers = [number for number, error in enumerate(checked) if error is None]
    answers: dict[int, Any] = {number: error for number, error in enumerate(checked) if error is not None}
    with SeveralProgress([spec.model for spec in specs], quiet=plan.quiet) as progress:
        worker_answers = verify_in_workers(
            [specs[number] for number in numbers], count, progress.report_of, debug=debug
        )
        with closing(worker_answers):
            for number in range(len(specs)):
                while number not in answers:  # those behind it may be done before
                    at, answer = next(worker_answers)
                    answers[numbers[at]] = answer
                    progress.finish(numbers[at])
                with progress.hide_bar():
                    yield answers.pop(number)


def _settle(answer: Any, spec: Spec, project: Project, source: str, plan: RunPlan) -> Verdict:
    """Returns the verdict with what its entries and the project's accept, or raises what came in its place."""
    if isinstance(answer, BaseException):
        raise answer
    verdict: Verdict = mark_accepted(answer, spec.accept, project, expect=spec.expect, strict=plan.strict)
    return replace(verdict, source="" if source == COMMAND_LINE else source)


def _name_error(spec: Spec) -> SpecError | None:
    """Says what is wrong with the name of a model, at once: torch is not imported yet. None: nothing is."""
    from gaverify.loading.importing import check_name

    try:
        check_name(spec.model)
    except SpecError as error:
        return error
    return None


def _tell_skipped(skipped: Failure, row_width: int | None) -> None:
    if row_width is None:
        say(f"{skipped.source}: {skipped.message}", "skipped")
        return
    from gaverify.report import print_no_answer

    print_no_answer("skipped", skipped.source, skipped.message, row_width)
    sys.stdout.flush()


def _print_row(width: int, verdict: Verdict) -> None:
    from gaverify.report import print_line

    print_line(verdict, width)
    sys.stdout.flush()


def _print_table(show_all: bool, verdict: Verdict) -> None:
    from gaverify.report import print_answer

    print_answer(verdict, show_all=show_all)
    click.echo()  # before the next table or the summary; flushes


def verify_job(spec: Spec, project: Project, source: str) -> Verdict:
    """Returns the verdict of a spec, with what its entries and the project's accept; `source` is its file."""
    with closing(_answers([(source, spec)], RunPlan(), debug=False)) as answers:
        return _settle(next(answers), spec, project, source, RunPlan())


def _verify_one(spec: Spec, number: int, count: int, *, quiet: bool) -> Verdict:
    # Importing torch takes seconds, and a misspelt name can be answered before.
    if "gaverify.verification" not in sys.modules and (error := _name_error(spec)):
        raise error
    with guests(), DelayedProgress(spec.model, number, count, quiet=quiet) as progress:
        with pause_collector():
            try:
                from gaverify.verification import verify_spec  # inside, as importing torch may warn
            except Exception as error:
                raise BrokenTorch(error) from error

        return verify_spec(spec, progress=progress.report)
