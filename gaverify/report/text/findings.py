"""What every answer shares at its end: the findings, and the outcome with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from gaverify.records.audit_report import AuditReport
from gaverify.records.comparison import Outcome
from gaverify.records.findings import Finding
from gaverify.records.verdict import Verdict
from gaverify.report.text.layout import Layout, Line
from gaverify.report.text.table import STYLES


def finding_lines(finding: Finding, layout: Layout) -> list[Line]:
    """Returns a finding: heading with place and summary, then evidence, remedy and page on lines of their own."""
    head = f"{finding.code} {finding.name}"
    if kind_of(finding) != "proven":
        head += f" ({kind_of(finding)})"
    if finding.accepted:
        head += " (accepted)"
    text, where = told(finding)
    heads = [("where", where), ("accepted", finding.accepted)]
    lines = layout.wrap(f"{head}: {text}", indent=4)
    first = STYLES[Outcome.DIVERGENT] if finding.severity == "fault" else "bold"
    lines[0] = [(lines[0][1][0], first)]  # the heading starts at the margin, what follows hangs
    for label, statement in [*heads, *rows_of(finding), ("see", f"gaverify explain {finding.code}")]:
        if not statement:
            continue
        lines += layout.wrap(statement, first=f"    {layout.shorten(label, 10)}", indent=4 + 11)
    return lines


def rows_of(finding: Finding) -> list[tuple[str, str]]:
    """Returns what was seen, what a control showed and the remedy, as (label, text)."""
    rows = [(evidence.label, evidence.statement) for evidence in finding.evidence]
    return [*rows, ("remedy", finding.remedy)] if finding.remedy else rows


def kind_of(finding: Finding) -> str:
    """Returns how sure a finding is, in a word: a note, proven or suspected."""
    return "note" if finding.severity == "note" else "proven" if finding.proven else "suspected"


def told(finding: Finding) -> tuple[str, str]:
    """Returns a finding's summary, and file and line where they have to be shown on a line of their own.

    The summary gets the finding's place in front unless it names the place already. Where it names the module but not
    the file and line, these are the second value; else that is "".
    """
    place, text = finding.location, finding.summary
    if place is None or not str(place):
        return text, ""
    if place.module is not None and f"`{place.module or '(root)'}`" in text:
        if place.file is None:
            return text, ""
        return text, f"{place.file}:{place.line}" if place.line is not None else place.file
    if str(place) in text:
        return text, ""
    return (f"{place}: {text}" if text else str(place)), ""


def acceptance_sentences(answer: Verdict | AuditReport) -> list[str]:
    """Returns what follows from the user's entries and expectation, for the end of a report; nothing without any."""
    acceptance = answer.acceptance
    sentences = ["accepted: every cause of the divergence is one that is known and wanted"] if answer.accepted else []
    if acceptance.expected is not None:
        met = "as expected" if acceptance.expected is answer.outcome else f"{acceptance.expected.value} was expected"
        sentences.append(met)
    sentences += [f"stale: {sentence}" for sentence in acceptance.stale]
    return [*sentences, *(f"not accepted: {sentence}" for sentence in acceptance.refused)]


def outcome_lines(outcome: Outcome, sentences: Sequence[str], layout: Layout) -> list[Line]:
    """Returns the outcome in capitals with its sentences behind it, the first of them bold."""
    word = outcome.name
    first, *more = sentences
    lines = layout.wrap(first, first=word, indent=len(word) + 2, style="bold")
    lines[0][0] = (lines[0][0][0], STYLES[outcome])
    for sentence in more:
        lines += layout.wrap(sentence, indent=len(word) + 2)
    return lines
