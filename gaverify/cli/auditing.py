"""`gaverify audit`: the user's own training script, unchanged; its options also in files, and folders of them.

The keys of a file are the command's own options without their dashes, so that a new option is a key, too. Options that
repeat (`set`, `full-env`) are tables of names and values; argument lists are one string as in a shell, or a list of
words.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from gaverify.cli.progress import DelayedProgress
from gaverify.cli.showing import check_outputs, exit_code_of, output_options, show, strict_option
from gaverify.cli.streams import Failure, Invocation, failures_of
from gaverify.errors import SpecError, unknown_key
from gaverify.spec.accepting import Accept, Project, project_settings, read_entries
from gaverify.spec.fields import OPTIONS, sentence
from gaverify.spec.loading import toml_files
from gaverify.text_files import table_of_file

if TYPE_CHECKING:
    from gaverify.audit.request import Request
    from gaverify.records.audit_report import AuditReport


_NOT_KEYS = frozenset({"kept", "quiet", "show_all", "strict", "form", "outputs", "color", "debug", "help"})
"""Options that say how to report: they belong to the call, not to one of its audits."""
_EXAMPLE = 'script = "train.py"'


class AuditFile(NamedTuple):
    """One file: the command's options as the command line would give them, and what it accepts and expects."""

    path: Path
    given: dict[str, Any]
    accept: tuple[Accept, ...]
    expect: str | None


def options_files(words: Iterable[str]) -> list[tuple[Path, str]]:
    """Returns the files of options that the words name, each with "" or why there is none.

    There are none where the first of the words is a script.

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
    return os.path.isdir(word) and not os.path.exists(os.path.join(word, "__main__.py"))


def read_options(file: Path, params: Sequence[click.Parameter]) -> AuditFile:
    """Returns what a file says.

    Args:
        file: A TOML file.
        params: The parameters of the command.

    Raises:
        SpecError: With every problem of the file.
    """
    table = table_of_file(file, "file of an audit")
    by_key = {_key(param): param for param in params if param.name not in _NOT_KEYS}
    if "model" in table and "script" not in table and "module" not in table:
        raise SpecError("is a spec, not the options of an audit; run it with `gaverify run`", str(file))
    keys = [*by_key, "accept", "expect"]
    problems = [f"$.{key}: {unknown_key(key, keys)}" for key in table if key not in keys]
    values = {str(param.name): _unset(param) for param in by_key.values()}
    for key, param in by_key.items():
        if key in table:
            values[str(param.name)] = _value(key, table[key], param, problems)
    if "script" not in table and "module" not in table:
        problems.append(f"$.script: is missing; write `{_EXAMPLE}`")
    accept = read_entries(table.get("accept", []), "$.accept", problems)
    expect = table.get("expect")
    if expect is not None and not OPTIONS["expect"].kind.fits(expect):
        problems.append(f"$.expect: {sentence('expect', '', table, option=False)}")
    if problems:
        raise SpecError(problems, str(file))
    for name in ("script", "full_script"):  # beside the file, as with a spec's model; else from where the command runs
        if values.get(name) and (file.parent / values[name]).exists():
            values[name] = str(file.parent / values[name])
    return AuditFile(file, values, accept, expect)


def _key(param: click.Parameter) -> str:
    """The option's long flag without dashes; an argument's, and a short flag's, own name."""
    flags = [flag for flag in param.opts if flag.startswith("--")]
    return flags[0].removeprefix("--") if flags else str(param.name)


def _unset(param: click.Parameter) -> Any:
    if param.nargs == -1 or param.multiple:
        return ()
    return False if getattr(param, "is_flag", False) else None


def _value(key: str, value: Any, param: click.Parameter, problems: list[str]) -> Any:
    """The value as the command line would give it; a value of a wrong kind becomes a problem."""
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            problems.append(f"$.{key}: must be true or false")
        return value
    if param.multiple:
        if not isinstance(value, dict) or not all(_is_plain(item) for item in value.values()):
            problems.append(f"$.{key}: must be a table of names and values; write `{key} = {{ NAME = 4 }}`")
            return ()
        return tuple(f"{name}={_word(item)}" for name, item in value.items())
    words = value if isinstance(value, list) else None
    if words is not None and all(_is_plain(item) for item in words):
        listed = tuple(map(_word, words))
        return listed if param.nargs == -1 else shlex.join(listed)
    if not _is_plain(value):
        problems.append(f"$.{key}: must be text, a number or a list of them")
        return None
    return tuple(_split(key, _word(value), problems)) if param.nargs == -1 else _word(value)


def _split(key: str, text: str, problems: list[str]) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        problems.append(f"$.{key}: {text!r} cannot be split into arguments: {error}")
        return []


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_Command = TypeVar("_Command", bound=Callable[..., Any])
_UPDATES, _TIMEOUT = 2, 3600.0
_NUMBERS = {"updates": (int, 2), "steps": (int, 1), "timeout": (float, 600), "seed": (int, 0), "ranks": (int, 2)}
"""Options that are numbers, and what a message offers in place of a word that is none."""


_EVENTS = (
    "One run, the order of its calls alone: exit code 0 where no fault is found in it, 1 where one is, 3 where no "
    "update was seen. With --updates 0 to the script's end."
)


def _repeated_option(option: str, name: str, metavar: str, text: str) -> Callable[[_Command], _Command]:
    return click.option(option, name, metavar=metavar, multiple=True, help=text)


@click.command(short_help="Check a training script, unchanged.", context_settings={"ignore_unknown_options": False})
@click.argument("script", metavar="SCRIPT", required=False)
@click.argument("arguments", metavar="[-- ARGS]", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "module", metavar="MODULE", help="Run `python -m MODULE` in place of a script.")
@click.option("--full", metavar='"ARGS"', help="Arguments of the full-batch run alone.")
@click.option("--accumulated", metavar='"ARGS"', help="Arguments of the accumulated run alone.")
@click.option("--full-script", metavar="FILE", help="Another script for the full-batch run.")
@_repeated_option("--full-env", "full_env", "K=V", "A variable of the full-batch run's environment; repeatable.")
@_repeated_option("--accumulated-env", "accumulated_env", "K=V", "The same for the accumulated run.")
@_repeated_option(
    "--full-set", "full_set", "NAME=VALUE", "A constant or default (argparse's, too) of the full-batch run."
)
@_repeated_option("--accumulated-set", "accumulated_set", "NAME=VALUE", "The same for the accumulated run.")
@_repeated_option("--set", "both_set", "NAME=VALUE", "The same for every run.")
@click.option("--seed", metavar="N", help="Seed Python, NumPy and torch before the script starts.")
@click.option("--updates", metavar="M", help=f"Optimizer updates to record.  [{_UPDATES}]")
@click.option("--steps", metavar="K", help="Backward passes that each update should have.  [found out]")
@click.option("--events-only", is_flag=True, help=_EVENTS)
@click.option("--tail", is_flag=True, help="Also audit epochs that end with a short window.")
@click.option("--timeout", metavar="S", help=f"Seconds until a run is ended.  [{_TIMEOUT:g}]")
@click.option("--ranks", metavar="R", help="Run the accumulated run in R processes, as torchrun would.")
@click.option("--launcher", metavar='"WORDS"', help="The command that starts the accumulated run, such as torchrun's.")
@click.option("--full-launcher", metavar='"WORDS"', help="The full-batch run's, if it seeds by rank.  [one process]")
@click.option("--in-place", is_flag=True, help="Let the runs change files, as the script does on its own.")
@click.option("--keep", metavar="DIR", help="Keep the runs' records in a new folder.")
@click.option("--from", "kept", metavar="DIR", help="Report again from kept records; runs nothing.")
@click.option("--name", metavar="TEXT", help="How reports call it.")
@click.option("-q", "--quiet", is_flag=True, help="A line for each audit.")
@click.option("-v", "--verbose", "--all", "show_all", is_flag=True, help="Show every parameter, not only the worst.")
@strict_option
@output_options
def audit(
    kept: str | None,
    name: str | None,
    quiet: bool,
    show_all: bool,
    strict: bool,
    form: str,
    outputs: tuple[Path, ...],
    **given: Any,
) -> int:
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
    from gaverify.acceptance import mark_accepted

    project = project_settings()
    if kept is None and given["module"] is None:
        files = options_files(filter(None, (given["script"], *given["arguments"])))
        if files:
            options = {**given, "name": name, "script": None, "arguments": ()}
            _refuse(options, "the options of these audits stand in their files")
            check_outputs(outputs)
            return _audit_files(files, project, form, outputs, quiet=quiet, show_all=show_all, strict=strict)
    request = None if kept is not None else _request(given)
    if kept is not None:
        _refuse(given, "--from reports again what was run before")
    check_outputs(outputs)
    from gaverify.audit.flow import audit_again

    report = _run_audit(request, quiet=quiet) if request is not None else audit_again(kept or "")
    report = mark_accepted(replace(report, name=name or ""), (), project, strict=strict)
    show([report], form, outputs, show_all=show_all, quiet=quiet)
    return report.exit_code


def _refuse(given: dict[str, Any], why: str) -> None:
    """Raises where options were given that nothing reads; names them as people write them, the script first."""
    names = {"script": f"`{given['script']}`", "both_set": "--set", "arguments": "arguments", "module": "-m"}
    also = [names.get(name, _option(name)) for name in sorted(given, key=lambda name: name != "script") if given[name]]
    if also:
        raise SpecError(f"{why}; leave out {', '.join(also)}")


def _audit_files(
    files: Sequence[tuple[Path, str]],
    project: Project,
    form: str,
    outputs: Sequence[Path],
    *,
    quiet: bool,
    show_all: bool,
    strict: bool,
) -> int:
    """Audits one file after the other; one that cannot be audited is an error of the report and stops no other."""
    from gaverify.acceptance import mark_accepted
    from gaverify.report import print_line

    invocation = click.get_current_context().find_object(Invocation) or Invocation()
    reports: list[AuditReport] = []
    failures: list[Failure] = []
    as_rows = quiet and form == "text"
    for number, (file, missing) in enumerate(files):
        try:
            if missing:
                raise SpecError(missing)
            options = read_options(file, audit.params)
            report = _run_audit(_request(options.given), number, len(files), quiet=quiet)
        except SpecError as error:  # of options that stand in the file, wherever they were checked
            named = SpecError(error.problems, str(file))
            failures += failures_of(named, str(file), invocation, as_rows=as_rows)
            continue
        except (Exception, SystemExit) as error:  # Ctrl-C ends them all
            failures += failures_of(error, str(file), invocation, as_rows=as_rows)
            continue
        final_report = mark_accepted(report, options.accept, project, expect=options.expect, strict=strict)
        reports.append(replace(final_report, source=str(file), name=options.given["name"] or ""))
        if as_rows:
            print_line(reports[-1])
    code = exit_code_of(reports, project, failures, strict=strict)
    show(
        reports,
        form,
        outputs,
        show_all=show_all,
        failures=failures,
        exit_code=code,
        printed=as_rows,
        quiet=quiet,
    )
    return code


def _request(given: dict[str, Any]) -> Request:
    """Returns what the options ask for; problems are told by its check, with those of the script."""
    from gaverify.audit.request import Request, Setting

    script, module, arguments = given["script"], given["module"], given["arguments"]
    if module is not None and script is not None:
        arguments, script = (script, *arguments), None  # `-m MODULE -- ARGS`: the first word is no script
    if script is None and module is None:
        raise click.UsageError("nothing to audit: name the training script, SCRIPT, or a module with `-m`")
    problems = list(_conflicts(given))
    asked = {name: given[name] for name in ("events_only", "keep", "in_place", "tail")}
    asked |= {
        name: _words(name, given[name], problems) for name in ("full", "accumulated", "launcher", "full_launcher")
    }
    shared_values = _pairs("--set", given["both_set"], problems)
    for run, own_script in (("full", given["full_script"]), ("accumulated", None)):
        variables = _pairs(f"--{run}-env", given[f"{run}_env"], problems)
        values = _pairs(f"--{run}-set", given[f"{run}_set"], problems)
        asked[f"{run}_setting"] = Setting(own_script, variables, (*shared_values, *values))
    asked |= _numbers(given, problems)
    return Request(module or script, common=arguments, module=module is not None, problems=tuple(problems), **asked)


def _conflicts(given: dict[str, Any]) -> Iterator[str]:
    """Options that do not go together, or lack their partner."""
    full, accumulated = given["full"], given["accumulated"]
    has_own_run = given["full_script"] is not None
    has_own_run = has_own_run or any(
        given[name] for name in ("full_env", "accumulated_env", "full_set", "accumulated_set")
    )
    if given["events_only"]:
        if has_own_run or full is not None or accumulated is not None:
            yield (
                "--events-only makes one run: give its arguments behind `--` and its values with --set, "
                "not in --full or --accumulated"
            )
    elif not has_own_run:
        if full is None and accumulated is not None:
            yield "--full is missing: the arguments that make the large batch, without accumulation"
        if accumulated is None and full is not None:
            yield "--accumulated is missing: the arguments that cut the same batch into micro-batches"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words(name: str, text: str | None, problems: list[str]) -> tuple[str, ...]:
    from gaverify.audit.request import words

    if text is not None and not text.strip() and "launcher" in name:
        option = _option(name)
        problems.append(f'{option} is empty; write a command, such as {option} "torchrun --nproc-per-node 2"')
    try:
        return words(text or "", _option(name))
    except SpecError as error:
        problems += error.problems
        return ()


def _numbers(given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The numbers that were given; the request has its own defaults for the others."""
    numbers: dict[str, Any] = {}
    for name, (kind, instead) in _NUMBERS.items():
        word, option = given[name], _option(name)
        try:
            numbers |= {} if word is None else {name: kind(word)}
        except ValueError:
            wanted = "a whole number" if kind is int else "a number of seconds"
            problems.append(f"{option} {word!r} is not {wanted}; write `{option} {instead}`")
    return numbers


def _pairs(option: str, words: Sequence[str], problems: list[str]) -> tuple[tuple[str, str], ...]:
    pairs: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name or "\0" in word:
            example = "BATCH_SIZE=4" if option.endswith("set") else "CUDA_VISIBLE_DEVICES=0"
            problems.append(f"{option} {word!r} has no name and value; write `{option} {example}`")
        elif name in pairs:
            problems.append(f"{option} gives `{name}` twice: {pairs[name]!r} and {value!r}")
        else:
            pairs[name] = value
    return tuple(pairs.items())


def _run_audit(request: Request, number: int = 0, count: int = 1, *, quiet: bool) -> AuditReport:
    from gaverify.audit.flow import audit as run

    with DelayedProgress(request.script, number, count, quiet=quiet, noun="audit") as progress:
        return run(request, progress.report)
