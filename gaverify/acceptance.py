"""What is added to findings: the lines around their places, and which of them a user's entries accept."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from gaverify.records.audit_report import AuditReport
from gaverify.records.comparison import Outcome
from gaverify.records.findings import Acceptance, Excerpt, Finding, Location
from gaverify.records.verdict import Verdict
from gaverify.spec.entries import Accept
from gaverify.spec.project import Project
from gaverify.tracebacks import portable

# The lines around a finding, read from the user's file while it still is what ran.


_AROUND = 4
"""Lines before and behind: enough to see the statement, few enough to read."""

_WIDEST = 300
"""Characters of a line that are kept: generated code has lines of megabytes."""


def with_excerpts(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns the findings, each with the lines around its place where that is a file that can be read."""
    return tuple(
        finding if finding.location is None else replace(finding, location=_read(finding.location))
        for finding in findings
    )


def _read(location: Location) -> Location:
    if location.file is None or location.line is None or location.excerpt is not None:
        return location
    linecache.checkcache(location.file)
    lines = linecache.getlines(location.file)  # in the encoding that the file declares; [] where there is none
    if not 1 <= location.line <= len(lines):
        return location
    first = max(location.line - _AROUND, 1)
    excerpt_lines = lines[first - 1 : location.line + _AROUND]
    return replace(location, excerpt=Excerpt(first, tuple(line.rstrip()[:_WIDEST] for line in excerpt_lines)))


# Known divergences: which findings a user's entries accept, and which entries match nothing any more.


Answer = TypeVar("Answer", Verdict, AuditReport)


def mark_accepted(
    answer: Answer, entries: Sequence[Accept], project: Project, *, expect: str | None = None, strict: bool = False
) -> Answer:
    """Returns the answer with its accepted findings marked.

    A fault is accepted by an entry of its code whose pattern fits its place, if a control run proved it or the entry
    says `suspected`. Entries of the answer's own spec that fit no finding are stale; those of the project may fit
    another spec, so that `describe_unused_entries` judges them over all answers.

    Args:
        answer: A verdict or an audit.
        entries: Of its spec or options.
        project: What `pyproject.toml` says; notes that it does not want are left out.
        expect: The outcome that the spec expects.
        strict: Stale entries make the exit code 1.
    """
    everywhere = (*entries, *project.accept)
    findings_shown = [
        finding for finding in answer.findings if finding.severity == "fault" or project.shows(finding.code)
    ]
    findings = tuple(_mark_finding(finding, everywhere) for finding in findings_shown)
    stale = [entry for entry in entries if not any(_fits(entry, finding) for finding in answer.findings)]
    refused = [
        _refusal(entry, finding, everywhere)
        for finding in findings
        for entry in everywhere
        if finding.severity == "fault" and not finding.accepted and _fits(entry, finding)
    ]
    acceptance = Acceptance(
        expected=Outcome(expect) if expect else None,
        stale=tuple(f"accept entry {entry} matches nothing any more: remove it" for entry in stale),
        strict=strict or project.strict,
        refused=tuple(dict.fromkeys(refused)),
    )
    return replace(answer, findings=findings, acceptance=acceptance)


def describe_unused_entries(answers: Iterable[Verdict | AuditReport], project: Project) -> tuple[str, ...]:
    """Returns a sentence for each of the project's entries that fits no finding of any answer."""
    findings = [finding for answer in answers for finding in answer.findings]
    stale = [entry for entry in project.accept if not any(_fits(entry, finding) for finding in findings)]
    return tuple(f"{project.source}: accept entry {entry} matches nothing any more: remove it" for entry in stale)


def entries_for(findings: Iterable[Finding], reason: str) -> tuple[list[Accept], list[str]]:
    """Returns an entry for each fault that is not accepted yet, and a sentence for each that cannot be."""
    entries: list[Accept] = []
    problems: list[str] = []
    for finding in findings:
        if finding.severity != "fault" or finding.accepted:
            continue
        if finding.code == "GAV000":
            reason_why_not = "no cause was found, and an unexplained divergence cannot be accepted"
            problems.append(f"{finding.code} {finding.name}: {reason_why_not}")
            continue
        for place in finding.places:
            entry = Accept(code=finding.code, location=_pattern(place), reason=reason, suspected=not finding.proven)
            entries += [entry] if entry not in entries else []
    return entries, problems


def _pattern(place: Location | None) -> str:
    """The place of a finding as a pattern that fits it: the module; else the file, without the line, which moves.

    The file is named as any machine knows it: the entry is written on a desk and read in CI.
    """
    text = "*" if place is None else place.module or (portable(place.file) if place.file else "*")
    return "".join(f"[{character}]" if character in "*?[" and text != "*" else character for character in text)


def _mark_finding(finding: Finding, entries: Iterable[Accept]) -> Finding:
    """Every place of the finding has to be accepted: what is proven of all of them together is so of none alone."""
    if finding.severity != "fault":
        return finding
    fitting = [entry for entry in entries if _fits(entry, finding) and (finding.proven or entry.suspected)]
    all_accepted = fitting and not _places_without_entry(finding, fitting)
    return replace(finding, accepted=fitting[0].reason if all_accepted else "")


def _places_without_entry(finding: Finding, entries: Iterable[Accept]) -> list[Location | None]:
    """The places of a finding that no entry fits."""
    same_code = [entry for entry in entries if entry.code == finding.code]
    return [place for place in finding.places if not any(_is_at(entry, place) for entry in same_code)]


def _refusal(entry: Accept, finding: Finding, entries: Iterable[Accept]) -> str:
    """Says why an entry that fits a finding does not accept it."""
    open_places = _places_without_entry(finding, entries)
    if open_places:
        return f"{entry} does not cover everything: {', '.join(map(str, open_places))} was found too and has no entry"
    return f"{entry} is only suspected and may not be all that differs; `suspected = true` in its entry accepts it"


def _fits(entry: Accept, finding: Finding) -> bool:
    return entry.code == finding.code and any(_is_at(entry, place) for place in finding.places)


def _is_at(entry: Accept, place: Location | None) -> bool:
    if place is None:
        return entry.location == "*"
    names = ["(root)" if place.module == "" else place.module or ""]
    for file in (place.file, portable(place.file)) if place.file else ():
        names += [file, f"{file}:{place.line}"] if place.line is not None else [file]
    return entry.location == "*" or any(name and fnmatchcase(name, entry.location) for name in names)
