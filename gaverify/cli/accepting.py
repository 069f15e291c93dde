"""`gaverify baseline`: writes down what diverges today, so that only what is new fails tomorrow."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gaverify.cli.showing import debug_option
from gaverify.cli.streams import INTERRUPTED, Invocation, failures_of, say
from gaverify.errors import GaverifyError, SpecError
from gaverify.spec import Spec, parse_spec, read_specs
from gaverify.spec.accepting import Accept, project_settings

if TYPE_CHECKING:
    from gaverify.records.verdict import Verdict

_REASON = "known when `gaverify baseline` was run; write here why it is wanted"


@click.command(short_help="Accept what diverges now, in its specs.")
@click.argument("specs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--reason", metavar="TEXT", default=_REASON, help="Why the divergences are wanted.")
@click.option("--print", "only_print", is_flag=True, help="Print the entries and write nothing.")
@debug_option
@click.pass_obj
def baseline(invocation: Invocation | None, /, specs: tuple[Path, ...], reason: str, only_print: bool) -> int:
    """Verifies SPECS and appends an entry of `accept` to each for every cause that is found and not accepted yet.

    A divergence without a known cause, and what could not be decided, are told and not accepted: the exit code is then
    that of `gaverify run`. A spec that cannot be verified is told, too, and does not stop the others.
    """
    from gaverify.cli.running import verified

    if not reason.strip():
        raise SpecError("--reason: must be text that is not empty")
    project = project_settings()
    code = 0
    for file, spec in read_specs(specs):
        try:
            if isinstance(spec, SpecError):
                raise spec
            verdict = verified(spec, project, str(file))
            left = _settle(file, spec, verdict, reason, only_print=only_print)
        except (Exception, SystemExit) as error:
            left = failures_of(error, str(file), invocation or Invocation())[0].code
            if left == INTERRUPTED:
                return left
        code = max(code, left)
    return code


def _settle(file: Path, spec: Spec, verdict: Verdict, reason: str, *, only_print: bool) -> int:
    """Accepts what one verdict found; returns what `gaverify run` will leave with afterwards."""
    from gaverify.acceptance import entries_for

    if verdict.exit_code == 0:
        click.echo(f"{file}: nothing to accept ({verdict.outcome.value})", err=only_print)
        return 0
    entries, problems = entries_for(verdict.findings, reason)
    for problem in problems:
        say(f"{file}: {problem}", "warning")
    if not entries or verdict.outcome.value != "divergent":
        say(f"{file}: {verdict.outcome.value}; there is no cause to accept", "warning")
        return verdict.exit_code
    text = "".join(map(_table, entries))
    if only_print:
        click.echo(f"# {file}\n{text}", nl=False)
    else:
        _append(file, spec, text, len(entries))
        listed = ", ".join(map(str, entries))
        click.echo(f"{file}: accepts {listed}")
    return verdict.exit_code if problems else 0


def _table(entry: Accept) -> str:
    """Returns the entry as a TOML table; strings are written by `json`, as every JSON string is a TOML string."""
    lines = ["", "[[accept]]", *(f"{key} = {json.dumps(value)}" for key, value in _pairs(entry))]
    return "\n".join(lines) + "\n"


def _pairs(entry: Accept) -> Sequence[tuple[str, str | bool]]:
    pairs: list[tuple[str, str | bool]] = [("code", entry.code), ("location", entry.location), ("reason", entry.reason)]
    return [*pairs, ("suspected", True)] if entry.suspected else pairs


def _append(file: Path, spec: Spec, text: str, added: int) -> None:
    """Appends the tables to the spec's file, after checking that the new text is TOML with just these entries more."""
    from gaverify.report.formats import write_whole

    old = file.read_text(encoding="utf-8-sig")
    new = (old if old.endswith("\n") or not old else old + "\n") + text
    try:
        accept = parse_spec({**tomllib.loads(new)}, str(file)).accept
    except (tomllib.TOMLDecodeError, SpecError) as error:
        raise GaverifyError(
            f"`{file}` has its list `accept` on one line; write each of its entries as a table `[[accept]]`, "
            f"or add these lines by hand:\n{text}"
        ) from error
    if len(accept) != len(spec.accept) + added:
        raise GaverifyError(f"`{file}` cannot be extended; add these lines by hand:\n{text}")
    write_whole(file, new)
