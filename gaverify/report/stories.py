"""The common answer: what a verdict, an audit and a profile all say. Formats that show all of them read this.

A verdict answers with one table of parameters, an audit with one per optimizer update, a profile with none but a row
per strategy and K. Tools outside Python need a place as a path relative to the repository, and a line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaverify.errors import USAGE, worst_exit_code
from gaverify.records.audit import UpdateComparison
from gaverify.records.audit_report import AuditReport
from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.environment import Environment
from gaverify.records.findings import Finding
from gaverify.records.profile import LABELS, Profile, Row, Setting
from gaverify.records.verdict import Verdict
from gaverify.report.text.audit import audit_facts, audit_method
from gaverify.report.text.profile import profile_facts, profile_sentence
from gaverify.report.text.verdict import acceptance_sentences, acceptance_states, guess_sentences, verdict_facts
from gaverify.report.text.wording import join_title, method, sentence
from gaverify.tracebacks import repository_of

Answer = Verdict | AuditReport | Profile


@dataclass(frozen=True)
class Report:
    """Everything that one call of a command found.

    Args:
        answers: In the order they were run.
        errors: One (source, message) for each run that came to no answer.
        show_all: Every parameter in tables; else long ones are folded to those that are not equivalent.
        exit_code: What the command leaves with; None where no command made the report.
        started: When the command was called, as `2026-01-31T12:00:00+00:00`; "" where no command made the report.
    """

    answers: tuple[Answer, ...]
    errors: tuple[tuple[str, str], ...] = ()
    show_all: bool = False
    exit_code: int | None = None
    started: str = ""

    @property
    def code(self) -> int:
        """The exit code of the command that made the report, or that it would have; never 0 without an answer."""
        if self.exit_code is not None:
            return self.exit_code
        failed = [USAGE] if self.errors or not self.answers else []
        return worst_exit_code([answer.exit_code for answer in self.answers] + failed)


@dataclass(frozen=True)
class Table:
    """Parameters that were compared together; `heading` names the update of an audit, "" is a verdict's only table."""

    heading: str
    outcome: Outcome
    rows: tuple[ParameterComparison, ...]


@dataclass(frozen=True)
class Story:
    """What a verdict, an audit and a profile all say."""

    kind: str
    """Command that made the answer: `run`, `audit` or `profile`."""
    title: str
    """The spec's file and name, else the model or script; distinguishes this answer from the others."""
    source: str
    """File of the spec or script; empty: the command line said what to run."""
    outcome: Outcome
    """Outcome of all compared parameters and findings together."""
    sentence: str
    """Why, in one sentence."""
    method: str
    """How it was decided, in words; empty: nothing was."""
    findings: tuple[Finding, ...] = ()
    """Causes and notes."""
    tables: tuple[Table, ...] = ()
    """Compared parameters: one table of a verdict, one per update of an audit, none of a profile."""
    rows: tuple[Row, ...] = ()
    """Rows of a profile; empty for a verdict and an audit."""
    seconds: float = 0.0
    """How long it took; 0.0 where no total was measured."""
    model: str = ""
    """The model as the spec names it; empty for a script."""
    command: str = ""
    """Command that makes the answer again; empty: not known."""
    accepted: bool = False
    """Whether the user accepts the divergence."""
    states: tuple[str, ...] = ()
    """What accepted or expected outcomes and guesses make of the answer, a word or two each."""
    remarks: tuple[str, ...] = ()
    """What follows from accepted divergences, expectations and guesses, in sentences."""
    passed: bool = False
    """Whether the command exits with 0 for this answer: equivalent, accepted or expected."""
    facts: Sequence[tuple[str, str]] = ()
    """What was run, as (label, text)."""
    heading: str = ""
    """Title line above the facts; empty: a profile without a setting."""
    made_by: str = ""
    """Versions, platform and git commit; empty: nothing ran."""
    started: str = ""
    """UTC time when the answer was made; empty: not known."""

    @property
    def said(self) -> str:
        """The outcome in words; an accepted divergence is no failure, but it is no agreement either."""
        return f"{self.outcome.value}, accepted" if self.accepted else self.outcome.value


def story_of(answer: Answer) -> Story:
    """Returns what `answer` has in common with every other."""
    if isinstance(answer, Verdict):
        return _verdict(answer)
    return _audit(answer) if isinstance(answer, AuditReport) else _profile(answer)


def _verdict(verdict: Verdict) -> Story:
    return Story(
        kind="run",
        title=join_title(verdict.source, verdict.name) or verdict.run.model,
        source=verdict.source,
        sentence=sentence(verdict),
        method=method(verdict),
        tables=(Table("", verdict.outcome, verdict.parameters),) if verdict.parameters else (),
        model=verdict.run.model,
        facts=verdict_facts(verdict),
        heading=f"gaverify {verdict.run.environment.gaverify}",
        made_by=_made_by(verdict.run.environment),
        started=verdict.run.environment.started,
        **_common_values(verdict) | _warn_of_guesses(verdict),
    )


def _warn_of_guesses(verdict: Verdict) -> dict[str, Any]:
    """What a verdict says of a factory that `gaverify init` wrote, before all that the user said of the outcome."""
    states = ("guessed loss",) if "the loss" in verdict.run.guesses else ()
    return {
        "states": (*acceptance_states(verdict), *states),
        "remarks": (*guess_sentences(verdict.run), *acceptance_sentences(verdict)),
    }


def _audit(report: AuditReport) -> Story:
    return Story(
        kind="audit",
        title=join_title(report.source, report.name or report.script),
        source=report.source or report.script,
        sentence=report.reason,
        method=audit_method(report),
        tables=tuple(
            Table(f"update {update.number}", _outcome_of_update(update), update.parameters) for update in report.updates
        ),
        facts=audit_facts(report),
        heading=f"gaverify {report.environment.gaverify} audit",
        made_by=_made_by(report.environment),
        started=report.environment.started,
        **_common_values(report)
        | {"states": (*acceptance_states(report), *["calls in order"] * report.calls_in_order)},
    )


def _common_values(answer: Verdict | AuditReport) -> dict[str, Any]:
    """What a verdict and an audit say alike."""
    return {
        "outcome": answer.outcome,
        "findings": answer.findings,
        "seconds": answer.timings.get("total", 0.0),
        "command": answer.command,
        "accepted": answer.accepted,
        "states": tuple(acceptance_states(answer)),
        "remarks": tuple(acceptance_sentences(answer)),
        "passed": answer.exit_code == 0,
    }


def _made_by(made: Environment | Setting) -> str:
    versions = f"gaverify {made.gaverify}, torch {made.torch}, Python {made.python}, {made.platform}"
    return ", commit ".join(filter(None, (versions, getattr(made, "commit", "")[:12])))


def _outcome_of_update(update: UpdateComparison) -> Outcome:
    """The update's outcome; where the runs had different data or weights, its difference means nothing."""
    return update.outcome if update.judged else Outcome.INCONCLUSIVE


def _profile(profile: Profile) -> Story:
    setting = profile.setting
    return Story(
        kind="profile",
        title=join_title(profile.source, profile.name) or (setting.model if setting else "profile"),
        source=profile.source,
        outcome=profile.outcome,
        sentence=profile_sentence(profile),
        method="",
        rows=profile.rows,
        model=setting.model if setting else "",
        command=profile.command,
        passed=profile.exit_code == 0,
        facts=profile_facts(profile),
        heading=f"gaverify {setting.gaverify} profile" if setting else "",
        made_by=_made_by(setting) if setting else "",
    )


def row_name(row: Row) -> str:
    """Returns how reports call a row of a profile: `accumulate, K = 4`."""
    return f"{LABELS[row.strategy]}, K = {row.steps}"


_EXPLANATIONS = ("GAV301",)
"""Codes of notes that say how gaverify compared, and ask nobody to change a line."""


def findings_at_lines(story: Story) -> list[Finding]:
    """Returns the findings that a pull request or an editor shows at a line."""
    return [finding for finding in story.findings if finding.code not in _EXPLANATIONS]


@dataclass(frozen=True)
class Place:
    """A line of a file; `inside` says whether the file lies in the repository, and `path` is relative to its root then.

    `text` is the line as it stood when the finding was made, "" where it was not read.
    """

    path: str
    line: int
    inside: bool
    text: str = ""


def place_of(finding: Finding | None, story: Story) -> Place | None:
    """Returns the finding's own line; else the first line of the file that says what was run; None without any file.

    A pull request shows an annotation only at a file, and the spec or script is where a reader goes on from.
    """
    location = finding.location if finding is not None else None
    if location is not None and location.file:
        text = location.excerpt.line(location.line) if location.excerpt is not None else ""
        return _place(location.file, location.line or 1, text)
    return next((_place(file, 1, "") for file in _files(story) if os.path.isfile(file)), None)


def _files(story: Story) -> Iterator[str]:
    yield from filter(None, (story.source, story.model.rpartition(":")[0]))


def _place(file: str, line: int, text: str) -> Place:
    path = Path(os.path.abspath(file))
    root = repository_of(path.parent) or Path.cwd()
    if path.is_relative_to(root):
        return Place(path.relative_to(root).as_posix(), line, True, text)
    return Place(path.as_posix(), line, False, text)
