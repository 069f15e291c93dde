"""Adds to findings the lines around their places, and says which of them a user's entries accept."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import TypeVar

from gaverify.errors import SpecError
from gaverify.records.answers import Answer
from gaverify.records.audit_report import Audit
from gaverify.records.findings import Acceptance, Excerpt, Finding, Location
from gaverify.records.outcomes import Outcome
from gaverify.records.verdict import Verdict
from gaverify.spec.entries import Accept, read_entries
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


AnyAnswer = TypeVar("AnyAnswer", bound=Answer)


def mark_accepted(
    answer: AnyAnswer, entries: Sequence[Accept], project: Project, *, expect: str | None = None, strict: bool = False
) -> AnyAnswer:
    """Returns the answer with its accepted findings marked.

    An entry accepts a fault of its code whose place fits its pattern; so does a comment at the fault's line. A control
    run must have proved the fault, or the entry says `suspected`; and the entry's last day is not over. Entries of the
    answer's own spec that fit no finding are stale; those of the project may fit another spec, so that
    `describe_unused_entries` judges them over all answers.

    Args:
        answer: A verdict or an audit.
        entries: The entries of its spec or options.
        project: The settings of `pyproject.toml`; notes that it does not want are left out.
        expect: The outcome that the spec expects.
        strict: Stale entries make the exit code 1.

    Raises:
        SpecError: A comment at a line cannot be read, or has no reason.
    """
    findings_shown: list[Finding] = [
        finding for finding in answer.findings if finding.severity == "fault" or project.shows(finding.code)
    ]
    everywhere = (*entries, *project.accept, *_read_comments(findings_shown))
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


_COMMENT = re.compile(r"#\s*gaverify:\s*accept\b(.*)")
_ACCEPTED = re.compile(r"\s+(GAV\d{3})\s*\(\s*(\S.*?)\s*\)\s*(?:#.*)?")
_COMMENT_EXAMPLE = "`# gaverify: accept GAV202 (counts are equal in our data)`"


def _read_comments(findings: Iterable[Finding]) -> list[Accept]:
    """The entries that comments make, each at the line of a fault or alone in the line above."""
    places = [place for finding in findings if finding.severity == "fault" for place in finding.places]
    entries: list[Accept] = []
    for place in dict.fromkeys(places):
        if place is None or place.file is None or place.line is None:
            continue
        lines = [linecache.getline(place.file, number) for number in (place.line - 1, place.line) if number > 0]
        above = [line for line in lines[:-1] if line.lstrip().startswith("#")]
        for text in (*above, lines[-1]):
            where = f"{place.file}:{place.line - (text in above)}"
            if entry := read_comment(text, where):
                entries.append(replace(entry, location=f"{_escape(place.file)}:{place.line}"))
    return entries


def read_comment(line: str, where: str) -> Accept | None:
    """Returns the entry that a comment in a line of code makes for this line; None where there is no such comment.

    Raises:
        SpecError: The comment cannot be read, or has no reason.
    """
    comment = _COMMENT.search(line)
    if comment is None:
        return None
    accepted = _ACCEPTED.fullmatch(comment[1].rstrip())
    if accepted is None:
        raise SpecError(f"{where}: the comment needs a code and, in parentheses, a reason; write {_COMMENT_EXAMPLE}")
    problems: list[str] = []
    entries = read_entries([{"code": accepted[1], "location": where, "reason": accepted[2]}], where, problems)
    if problems:
        raise SpecError(problems)
    return entries[0]


def check_comments(file: str) -> None:
    """Checks the comments of a script before it runs.

    Raises:
        SpecError: One of them cannot be read, or has no reason.
    """
    for number, line in enumerate(linecache.getlines(file), 1):
        read_comment(line, f"{file}:{number}")


def describe_unused_entries(answers: Iterable[Verdict | Audit], project: Project) -> tuple[str, ...]:
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
        patterns = [_pattern(place) for place in finding.places]
        # one entry for the layers of a finding, where their paths have something in common
        if len(set(patterns)) > 1 and (common := _common_pattern(finding.places)):
            patterns = [common]
        for pattern in patterns:
            entry = Accept(code=finding.code, location=pattern, reason=reason, suspected=not finding.proven)
            entries += [entry] if entry not in entries else []
    return entries, problems


def _common_pattern(places: Sequence[Location | None]) -> str:
    """Returns one pattern for the modules of several places, such as `layers.*.norm`; "" where none tells them."""
    paths = [place.module.split(".") if place is not None and place.module else [] for place in places]
    if not all(paths):
        return ""
    same_depth = len({len(path) for path in paths}) == 1
    names = [names[0] if len(set(names)) == 1 else "*" for names in zip(*paths, strict=False)]
    if not same_depth:  # what follows the names that all begin with
        names = [*takewhile(lambda name: name != "*", names), "*"]
    if set(names) != {"*"}:
        return ".".join(name if name == "*" else _escape(name) for name in names)
    # the layers of one `Sequential` have numbers only
    is_numbered = same_depth and all(name.isdigit() for path in paths for name in path)
    return ".".join(["[0-9]*"] * len(names)) if is_numbered else ""


def _pattern(place: Location | None) -> str:
    """The place of a finding as a pattern that fits it: the module; else the file, without the line, which moves.

    The file is named as any machine knows it: the entry is written on a desk and read in CI.
    """
    text = "" if place is None else place.module or (portable(place.file) if place.file else "")
    return _escape(text) or "*"


def _escape(text: str) -> str:
    """The text as a pattern that fits it alone."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in text)


def _mark_finding(finding: Finding, entries: Iterable[Accept]) -> Finding:
    """Every place of the finding has to be accepted: what is proven of all of them together is so of none alone."""
    if finding.severity != "fault":
        return finding
    fitting = [
        entry
        for entry in entries
        if _fits(entry, finding) and (finding.proven or entry.suspected) and not entry.is_expired
    ]
    all_accepted = fitting and not _places_without_entry(finding, fitting)
    return replace(finding, accepted=fitting[0].reason if all_accepted else "")


def _places_without_entry(finding: Finding, entries: Iterable[Accept]) -> list[Location | None]:
    """The places of a finding that no entry fits."""
    same_code = [entry for entry in entries if entry.code == finding.code]
    return [place for place in finding.places if not any(_is_at(entry, place) for entry in same_code)]


def _refusal(entry: Accept, finding: Finding, entries: Iterable[Accept]) -> str:
    """Says why an entry that fits a finding does not accept it."""
    if entry.is_expired:
        return f"{entry} was accepted until {entry.until}, which is over: repair it, or write a later day"
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
