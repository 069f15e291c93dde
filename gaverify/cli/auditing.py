"""`gaverify audit`: the user's own training script, unchanged; its options also in files, and folders of them.

The keys of a file are the command's own options without their dashes, so that a new option is a key, too. Options that
repeat (`set`, `full-env`) are tables of names and values; argument lists are one string as in a shell, or a list of
words.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gaverify.acceptance import check_comments, mark_accepted
from gaverify.audit.launchers import find_remote_word
from gaverify.audit.request import OPTIONS, Request
from gaverify.cli.options import add_options
from gaverify.cli.patching import Wish, patch_options, settle_patch
from gaverify.cli.showing import check_outputs, exit_code_of, output_options, show, strict_option
from gaverify.cli.streams import DelayedProgress, Failure, Invocation, failures_of
from gaverify.errors import SpecError
from gaverify.spec.entries import Accept, read_entries
from gaverify.spec.fields import OPTIONS as SPEC_OPTIONS
from gaverify.spec.loading import toml_files
from gaverify.spec.options import explain_values, read_table, read_words, write_example
from gaverify.spec.project import Project, project_settings
from gaverify.text_files import table_of_file

if TYPE_CHECKING:
    from gaverify.records.audit_report import Audit


# A file of an audit says, as a spec does, which divergences and which outcome are fine.
_FILE_OPTIONS = {**OPTIONS, **{name: SPEC_OPTIONS[name] for name in ("accept", "expect")}}


class AuditFile(NamedTuple):
    """The options of an audit in a TOML file."""

    request: Request
    """Its options as a request."""
    accept: tuple[Accept, ...]
    """Divergences that the file accepts."""
    expect: str | None
    """The outcome that counts as a success; None: equivalent."""


def options_files(words: Iterable[str]) -> list[tuple[Path, str]]:
    """Returns the files of options that the words name, each with "" or why there is none.

    Empty if the first of the words is a script.

    Raises:
        SpecError: A folder holds none.
    """
    listed = list(words)
    if not listed or not _holds_options(listed[0]):
        return []
    nothing = "the folder holds neither a `__main__.py`, as a script has, nor a *.toml file with an audit's options"
    files = list(toml_files(listed, nothing))
    if any(why == nothing for _, why in files):
        raise SpecError(nothing, next(str(path) for path, why in files if why == nothing))
    return files


def _holds_options(word: str) -> bool:
    if word.endswith(".toml"):
        return True
    # Python runs a folder with `__main__.py` as a script, so that it can be audited as one.
    return os.path.isdir(word) and not os.path.exists(os.path.join(word, "__main__.py"))


def read_options(file: Path) -> AuditFile:
    """Returns the options in a file.

    Args:
        file: A TOML file.

    Raises:
        SpecError: With every problem of the file.
    """
    table = table_of_file(file, "file of an audit")
    # Specs and options of audits are both TOML files, and easily taken for each other.
    if "model" in table and "script" not in table and "module" not in table:
        raise SpecError("is a spec, not the options of an audit; run it with `gaverify run`", str(file))
    problems: list[str] = []
    values, places = read_table(_FILE_OPTIONS, table, problems)
    if "script" not in table and "module" not in table:
        problems.append(f"$.script: is missing; write `{write_example(OPTIONS['script'], is_word=False)}`")
    values["accept"] = read_entries(values.get("accept", ()), places["accept"], problems)
    problems += explain_values(_FILE_OPTIONS, values, places)
    if problems:
        raise SpecError(problems, str(file))
    for name in ("script", "full_script"):  # beside the file, as with a spec's model; else from where the command runs
        if name in values and (file.parent / values[name]).exists():
            values[name] = str(file.parent / values[name])
    accept, expect = values.pop("accept"), values.pop("expect", None)
    return AuditFile(Request.from_values(values), accept, expect)


@click.command(short_help="Check a training script, unchanged.", context_settings={"ignore_unknown_options": False})
@add_options(OPTIONS.values())
@click.option("--from", "kept", metavar="DIR", help="Report again from a folder that --keep wrote; runs nothing.")
@click.option("-q", "--quiet", is_flag=True, help="One line per audit; with --diff or --fix only the diff.")
@click.option("-v", "--verbose", "--all", "show_all", is_flag=True, help="Show every parameter, not only the worst.")
@patch_options
@strict_option()
@output_options
def audit(
    kept: str | None,
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
    """Runs SCRIPT with a large batch and with accumulation, and compares the gradients at each optimizer step.

    ARGS after `--` are passed to every run. A run is stopped after M updates.

    \b
      gaverify audit train.py --full "--batch-size 8 --accum 1" \\
          --accumulated "--batch-size 2 --accum 4" -- --data d/
      gaverify audit train.py --full-set BATCH=8 --accumulated-set BATCH=2 \\
          --accumulated-set ACCUM=4
      gaverify audit audit.toml          # the options in a file, or in a folder of files
      gaverify audit -m package.train --events-only -- --accum 4
    """
    wish = Wish(diff, fix, unsafe)
    wish.check()
    project = project_settings()
    if kept is None and words["module"] is None:
        files = options_files(filter(None, (words["script"], *words["arguments"])))
        if files:
            # The first words are the files themselves.
            other_words = {**words, "script": None, "arguments": ()}
            # An option for several files would silently win over what each of them says.
            _refuse(other_words, "these audits take their options from the files")
            check_outputs(outputs)
            return _audit_files(files, project, form, outputs, wish, quiet=quiet, show_all=show_all, strict=strict)
    if kept is not None:
        # a name is for the report, which is made again
        _refuse({**words, "name": None}, "--from runs nothing and only reports again")
        wish.refuse("--from runs nothing, and a patch is tried in runs")
        check_outputs(outputs)
        from gaverify.audit.flow import audit_again

        report = replace(audit_again(kept), name=words["name"] or "")
    else:
        if words["script"] is None and words["module"] is None:
            raise click.UsageError("nothing to audit: name the training script, SCRIPT, or a module with `-m`")
        check_outputs(outputs)
        request = Request.from_values(read_words(OPTIONS, words))
        _refuse_patch(request, wish)
        report = _run_audit(request, wish, quiet=quiet)
    report = settle_patch(mark_accepted(report, (), project, strict=strict), wish)
    show([report], form, outputs, show_all=show_all, quiet=quiet, only_diffs=quiet and wish.asks)
    return report.exit_code


def _refuse(words: Mapping[str, Any], why: str) -> None:
    """Raises if options were given that nothing reads, and names them as people write them, the script first."""
    unread = [name for name in sorted(words, key=lambda name: name != "script") if words[name]]
    names = {"script": f"`{words['script']}`", "arguments": "arguments"}
    if unread:
        raise SpecError(f"{why}; leave out {', '.join(names.get(name, OPTIONS[name].flag) for name in unread)}")


def _audit_files(
    files: Sequence[tuple[Path, str]],
    project: Project,
    form: str,
    outputs: Sequence[Path],
    wish: Wish,
    *,
    quiet: bool,
    show_all: bool,
    strict: bool,
) -> int:
    """Audits one file after the other; a file that cannot be audited is an error in the report, and stops no other."""
    from gaverify.report import print_line

    invocation = click.get_current_context().find_object(Invocation) or Invocation()
    reports: list[Audit] = []
    failures: list[Failure] = []
    only_diffs = quiet and wish.asks
    has_rows = quiet and form == "text" and not only_diffs
    row_width = max(len(str(file)) for file, _ in files) if has_rows else None
    for number, (file, missing) in enumerate(files):
        try:
            if missing:
                raise SpecError(missing)
            options = read_options(file)
            report = _run_audit(options.request, wish, number, len(files), quiet=quiet)
        except SpecError as error:  # its options are checked in several places: all stand in this file
            named = SpecError(error.problems, str(file))
            ended = failures_of(named, str(file), invocation, row_width=row_width)
            failures += [failure._replace(position=number) for failure in ended]
            continue
        except (Exception, SystemExit) as error:  # Ctrl-C ends them all
            ended = failures_of(error, str(file), invocation, row_width=row_width)
            failures += [failure._replace(position=number) for failure in ended]
            continue
        final_report = mark_accepted(report, options.accept, project, expect=options.expect, strict=strict)
        reports.append(replace(settle_patch(final_report, wish), source=str(file)))
        if row_width is not None:
            print_line(reports[-1], row_width)
    code = exit_code_of(reports, project, failures, strict=strict)
    show(
        reports,
        form,
        outputs,
        show_all=show_all,
        failures=failures,
        exit_code=code,
        printed=row_width is not None,
        quiet=quiet,
        only_diffs=only_diffs,
    )
    return code


def _refuse_patch(request: Request, wish: Wish) -> None:
    if request.events_only:
        wish.refuse("--events-only makes one run, and a patch is tried in two")
    if request.in_place:
        wish.refuse("a patch is tried on copies of your files, and --in-place makes none")
    if word := find_remote_word(request.launcher) or find_remote_word(request.full_launcher):
        wish.refuse(f"`{word}` of the launcher starts processes on other machines, which see no copy to try a patch on")


def _run_audit(request: Request, wish: Wish, number: int = 0, count: int = 1, *, quiet: bool) -> Audit:
    from gaverify.audit.flow import audit as run

    if request.script is not None:
        check_comments(request.script)
    with DelayedProgress(request.target, number, count, quiet=quiet, unit="run", noun="audit") as progress:
        return replace(run(request, progress.report, patches=wish.patches), name=request.name)
