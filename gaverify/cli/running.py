"""`gaverify run`: verify one problem, or every spec that was named."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gaverify.cli.options import complete_specs, overrides_from, spec_options
from gaverify.cli.progress import DelayedProgress
from gaverify.cli.showing import check_outputs, exit_code_of, output_options, show, strict_option
from gaverify.cli.streams import (
    Failure,
    Invocation,
    failures_of,
    guests,
    paused,
    report_failure,
    say,
)
from gaverify.errors import INTERRUPTED, MissingPackage, SpecError
from gaverify.launched import await_first, is_first
from gaverify.spec import Spec, parse_spec, read_specs
from gaverify.spec.accepting import Project, project_settings

if TYPE_CHECKING:
    from gaverify.records.verdict import Verdict

_COMMAND_LINE = "command line"
_PrintEach = Callable[["Verdict"], None]


@click.command(short_help="Compare accumulated with full-batch gradients.")
@click.argument(
    "specs", nargs=-1, metavar="[MODEL|SPEC|FOLDER]...", type=click.Path(path_type=Path), shell_complete=complete_specs
)
@spec_options
@click.option("-q", "quiet", is_flag=True, help="A line for each model or spec.")
@click.option("-v", "--all", "show_all", is_flag=True, help="Show every parameter, not only the worst.")
@strict_option
@output_options
@click.pass_obj
def run(
    invocation: Invocation | None,
    /,
    specs: tuple[Path, ...],
    quiet: bool,
    show_all: bool,
    strict: bool,
    form: str,
    outputs: tuple[Path, ...],
    **words: Any,
) -> int:
    """Compares the accumulated gradient with the full batch's, for models and specs.

    A model is a built-in or `file.py:factory`, as for `--model`; a spec is a TOML file, and a folder holds several.
    Options override every one.

    \b
      gaverify run mlp --steps 4
      gaverify run my_model.py:factory --weighting tokens
      gaverify run configs/ --output report.html
    """
    overrides = overrides_from(words)
    if not is_first():  # rank 0 reports for all
        form, outputs = "text", ()
    check_outputs(outputs)
    invocation = invocation or Invocation()
    verdicts: list[Verdict] = []
    failures: list[Failure] = []
    print_each: _PrintEach | None = None
    project: Project | None = None
    try:
        project = project_settings()
        jobs = _jobs(specs, overrides)
        if form == "text" and is_first() and (len(jobs) > 1 or quiet):
            print_each = _print_row if quiet else partial(_print_table, show_all=show_all)
        named = {_COMMAND_LINE, *map(str, specs)}
        _verify_all(jobs, named, invocation, verdicts, failures, project, print_each, strict=strict)
    except SpecError as error:  # no spec can run; a report of an earlier call must not stand for this one
        code = report_failure(error, invocation)
        failures += [Failure(error.source, sentence, code) for sentence in error.problems]
    if any(failure.code == INTERRUPTED for failure in failures):  # half an answer replaces no whole one
        outputs = tuple(path for path in outputs if not path.exists())
    code = exit_code_of(verdicts, project, failures, strict=strict)
    if is_first():
        show(
            verdicts,
            form,
            outputs,
            show_all=show_all,
            failures=failures,
            exit_code=code,
            printed=print_each is not None,
            quiet=quiet,
        )
    await_first(code)
    return code


def _jobs(paths: Sequence[Path], overrides: dict[str, Any]) -> list[tuple[str, Spec | SpecError]]:
    """Returns each source with its spec, or with what is wrong with it."""
    if not paths and "model" not in overrides:
        raise click.UsageError("nothing to verify: name a model (see `gaverify models`) or spec files")
    models = [] if "model" in overrides else list(filter(_names_a_model, paths))
    given = [overrides] if not paths else [{**overrides, "model": str(model)} for model in models]
    files = [path for path in paths if path not in models]
    found = [(str(path), entry) for path, entry in read_specs(files, overrides)] if files else []
    return [*((_COMMAND_LINE, parse_spec({}, _COMMAND_LINE, own)) for own in given), *found]


def _names_a_model(word: Path) -> bool:
    """Whether a word stands for what `--model` takes: no path that exists, but for a model that transformers saved."""
    if os.path.exists(word):
        return (word / "config.json").is_file() and not any(word.glob("*.toml"))
    return ":" in word.name or not (word.suffix or word.parent.name)


def _verify_all(
    jobs: Sequence[tuple[str, Spec | SpecError]],
    named: AbstractSet[str],
    invocation: Invocation,
    verdicts: list[Verdict],
    failures: list[Failure],
    project: Project,
    print_each: _PrintEach | None,
    *,
    strict: bool,
) -> None:
    """Verifies one spec after the other into `verdicts` and `failures`; one that fails does not stop the rest.

    `print_each` gets each verdict as soon as it is there, so that a long run can be watched. Ctrl-C ends the list: what
    was not verified by then is a failure. A spec that nobody `named` and that lacks a package is skipped, unless
    that is `strict` or leaves no verdict at all.
    """
    skipped: list[Failure] = []
    for at, (source, spec) in enumerate(jobs):
        try:
            if isinstance(spec, SpecError):
                raise spec
            verdict = verified(spec, project, "" if source == _COMMAND_LINE else source, strict=strict)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if source not in named and not strict and (missing := package_failure(error, source)):
                skipped.append(missing)
                continue
            told = failures_of(error, source, invocation, alone=len(jobs) == 1, as_rows=print_each is _print_row)
            if told[0].code == INTERRUPTED:
                why = "interrupted before there was a verdict"
                failures += [Failure(left, why, INTERRUPTED) for left, _ in jobs[at:]]
                return
            failures += told
            continue
        verdicts.append(verdict)
        if print_each is not None:
            print_each(verdict)
    if not verdicts and not failures:
        failures += skipped


def package_failure(error: BaseException, source: str) -> Failure | None:
    """Tells that a spec is skipped where it lacks a package, and returns what to report if nothing else ran."""
    if not isinstance(error, MissingPackage):
        return None
    say(f"{source}: {error}", "skipped")
    return Failure(source, str(error), error.exit_code)


def _print_row(verdict: Verdict) -> None:
    from gaverify.report import print_line

    print_line(verdict)
    sys.stdout.flush()


def _print_table(verdict: Verdict, show_all: bool) -> None:
    from gaverify.report import print_answer

    print_answer(verdict, show_all=show_all)
    click.echo()  # before the next table or the summary; flushes


def verified(spec: Spec, project: Project, source: str, *, strict: bool = False) -> Verdict:
    """Returns the verdict of a spec, with what its entries and the project's accept; `source` is its file or ""."""
    from gaverify.acceptance import settled

    return replace(settled(_verify_one(spec), spec.accept, project, expect=spec.expect, strict=strict), source=source)


def _verify_one(spec: Spec) -> Verdict:
    if "gaverify.verification" not in sys.modules:
        from gaverify.loading.naming import check_name

        check_name(spec.model)  # before torch is imported: a name that does not exist is answered at once
    with guests(), DelayedProgress(spec.model) as progress:
        with paused():
            from gaverify.verification import verify_spec  # inside, as importing torch may warn

        return verify_spec(spec, progress=progress.report)
