"""`gaverify baseline`: writes down what diverges today, so that only what is new fails tomorrow."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gaverify.acceptance import entries_for, mark_accepted
from gaverify.cli.showing import debug_option, exit_code_of
from gaverify.cli.streams import Failure, Invocation, failures_of, say
from gaverify.errors import INTERRUPTED, GaverifyError, MissingPackage, SpecError
from gaverify.spec import Spec, parse_spec, read_specs
from gaverify.spec.entries import Accept
from gaverify.spec.project import project_settings
from gaverify.text_files import write_whole

if TYPE_CHECKING:
    from gaverify.records.verdict import Verdict

_REASON = "known when `gaverify baseline` was run; write here why it is wanted"


@click.command(short_help="Accept today's divergences in their specs.")
@click.argument("specs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--reason", metavar="TEXT", default=_REASON, help="Why the divergences are wanted.")
@click.option("--print", "only_print", is_flag=True, help="Print the entries and write nothing.")
@debug_option
@click.pass_obj
def baseline(invocation: Invocation | None, /, specs: tuple[Path, ...], reason: str, only_print: bool) -> int:
    """Runs SPECS and appends an `accept` entry to each for every cause that is found and not accepted yet.

    SPECS are TOML files of options, or folders of them. A divergence with an `accept` entry for each of its causes is
    accepted: `gaverify run` then exits with 0.

    Divergences without a known cause and undecided results are reported, not accepted. A spec that fails is reported,
    and the others still run. The exit code is that of `gaverify run` with the new entries.
    """
    from gaverify.cli.running import verify_job

    if not reason.strip():
        raise SpecError("--reason: must be text that is not empty")
    project = project_settings()
    verdicts: list[Verdict] = []
    failures: list[Failure] = []
    skipped: list[Failure] = []
    for file, spec in read_specs(specs):
        try:
            if isinstance(spec, SpecError):
                raise spec
            verdict = verify_job(spec, project, str(file))
            entries = _accept_causes(file, spec, verdict, reason, only_print=only_print)
        except (Exception, SystemExit) as error:
            if isinstance(error, MissingPackage):
                say(f"{file}: {error}", "skipped")
                skipped.append(Failure(str(file), str(error), error.exit_code))
                continue
            failures += failures_of(error, str(file), invocation or Invocation())
            if failures[-1].code == INTERRUPTED:
                break
            continue
        accepted = (*spec.accept, *entries)
        verdicts.append(mark_accepted(verdict, accepted, project, expect=spec.expect) if entries else verdict)
    return exit_code_of(verdicts, project, failures, skipped, strict=False)


def _accept_causes(file: Path, spec: Spec, verdict: Verdict, reason: str, *, only_print: bool) -> list[Accept]:
    """Writes or prints an entry for each cause that one verdict found; returns the entries."""
    if verdict.exit_code == 0:
        click.echo(f"{file}: nothing to accept ({verdict.outcome.value})", err=only_print)
        return []
    entries, problems = entries_for(verdict.findings, reason)
    for problem in problems:
        say(f"{file}: {problem}", "warning")
    if not entries or verdict.outcome.value != "divergent":
        say(f"{file}: {verdict.outcome.value}; there is no cause to accept", "warning")
        return []
    text = "".join(map(_table, entries))
    if only_print:
        click.echo(f"# {file}\n{text}", nl=False)
    else:
        _append(file, spec, text, len(entries))
        listed = ", ".join(map(str, entries))
        click.echo(f"{file}: accepts {listed}")
    return entries


def _table(entry: Accept) -> str:
    """Returns the entry as a TOML table; strings are written by `json`, as every JSON string is a TOML string."""
    values = {"code": entry.code, "location": entry.location, "reason": entry.reason}
    lines = ["", "[[accept]]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    lines += ["suspected = true"] if entry.suspected else []
    return "\n".join(lines) + "\n"


def _append(file: Path, spec: Spec, text: str, added: int) -> None:
    """Appends the tables to the spec's file, after checking that the new text is TOML with just these entries more."""
    # An editor on Windows may have put a byte order mark first, which is no TOML.
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
