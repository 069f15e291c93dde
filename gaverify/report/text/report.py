"""Any answer, and several with their summary, as lines of text."""

from __future__ import annotations

from gaverify.records.audit_report import AuditReport
from gaverify.records.verdict import Verdict
from gaverify.report.stories import Answer, Report, story_of
from gaverify.report.text.audit import audit_facts, audit_lines
from gaverify.report.text.layout import Layout, Line, joined
from gaverify.report.text.profile import profile_facts, profile_lines
from gaverify.report.text.summary import summary_lines
from gaverify.report.text.verdict import verdict_facts, verdict_lines


def answer_lines(answer: Answer, layout: Layout, show_all: bool = False) -> list[Line]:
    """Returns the whole report of one answer."""
    if isinstance(answer, Verdict):
        return verdict_lines(answer, layout, show_all)
    if isinstance(answer, AuditReport):
        return audit_lines(answer, layout, show_all)
    return profile_lines(answer, layout)


def facts_of(answer: Answer) -> list[tuple[str, str]]:
    """Returns what was run, as (label, text)."""
    if isinstance(answer, Verdict):
        return verdict_facts(answer)
    return audit_facts(answer) if isinstance(answer, AuditReport) else profile_facts(answer)


def report_lines(report: Report, layout: Layout) -> list[Line]:
    """Returns two reports side by side, or every answer with a summary where it is not one answer without errors."""
    if report.before:
        from gaverify.report.comparing import compared, comparison_lines

        lines = comparison_lines(compared(report.before, report.answers), layout)
        for source, message in report.errors:  # of the later report: what could not be run is in no pair
            lines += [[], *layout.wrap(f"error after: {source}: {message}", indent=4, style="bold red")]
        return lines
    blocks = [answer_lines(answer, layout, report.show_all) for answer in report.answers]
    if len(report.answers) != 1 or report.errors:
        blocks.append(summary_lines([story_of(answer) for answer in report.answers], report.errors, layout))
    return joined(blocks)
