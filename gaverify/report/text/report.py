"""Any answer, and several with their summary, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from gaverify.amounts import count_text, seconds_text
from gaverify.records.audit_report import AuditReport
from gaverify.records.comparison import Outcome
from gaverify.records.findings import Finding
from gaverify.records.profile import Profile
from gaverify.records.verdict import Verdict
from gaverify.report.stories import Answer, Report, Story, story_of
from gaverify.report.text.audit import audit_blocks
from gaverify.report.text.layout import Layout, Line, cells, clean, columns, fact_lines, join_blocks
from gaverify.report.text.profile import profile_blocks
from gaverify.report.text.table import STYLES
from gaverify.report.text.verdict import finding_lines, outcome_lines, verdict_blocks

_LABELS = {"run": 13, "audit": 14, "profile": 13}
"""Columns of a label above the tables, indent included."""

_WIDEST = 28
"""Columns of a name; a spec's path is told apart by its end, which shortening keeps."""


def answer_lines(answer: Answer, layout: Layout, show_all: bool = False) -> list[Line]:
    """Returns the whole report of one answer: the outcome and why, findings, then what was run and its numbers."""
    story = story_of(answer)
    facts = fact_lines(story.facts, layout, _LABELS[story.kind])
    return join_blocks([*_short_blocks(answer, story, layout), facts, *_blocks(answer, layout, show_all)])


def short_lines(answer: Answer, layout: Layout) -> list[Line]:
    """Returns the outcome of one answer and why, and its findings."""
    return join_blocks(_short_blocks(answer, story_of(answer), layout))


def answer_line(story: Story) -> str:
    """Returns an answer in one line: outcome, name, code and place of its first cause, why.

    `DIVERGENT cnn.py:factory GAV101 features.1 cnn.py:9, 8 of 10 parameters differ, by up to 85 %`
    """
    outcome = ", ".join([story.outcome.name, *story.states])
    faults = [finding for finding in story.findings if finding.severity == "fault"]
    faults.sort(key=lambda finding: bool(finding.accepted))  # stable: what is not accepted has to be looked at first
    words = [outcome, story.title, *(_code_and_place(fault) for fault in faults[:1])]
    if len(faults) > 1:
        words.append(f"and {count_text(len(faults) - 1, 'other cause')}")
    return clean(f"{' '.join(words)}, {story.sentence}")


def time_text(story: Story) -> str:
    """Returns how long an answer took, for the end of its line; "" where that is not known."""
    return f" ({seconds_text(story.seconds)})" if story.seconds else ""


def _code_and_place(finding: Finding) -> str:
    place, words = finding.location, [finding.code]
    if place is not None and place.module is not None:
        words.append(place.module or "(root)")
    if place is not None and place.file is not None:
        words.append(place.file if place.line is None else f"{place.file}:{place.line}")
    return " ".join(words)


def _short_blocks(answer: Answer, story: Story, layout: Layout) -> list[list[Line]]:
    first = layout.wrap(f"{story.heading}: {story.title}", style="bold") if story.heading else []
    first += outcome_lines(story.outcome, [story.sentence, *filter(None, [story.method]), *story.remarks], layout)
    if isinstance(answer, Profile) and answer.interrupted:
        first += layout.wrap("interrupted: the rows that were not run are missing", indent=2)
    return [first, *(finding_lines(finding, layout) for finding in story.findings)]


def _blocks(answer: Answer, layout: Layout, show_all: bool) -> list[list[Line]]:
    if isinstance(answer, Verdict):
        return verdict_blocks(answer, layout, show_all)
    if isinstance(answer, AuditReport):
        return audit_blocks(answer, layout, show_all)
    return profile_blocks(answer, layout)


def report_lines(report: Report, layout: Layout) -> list[Line]:
    """Returns every answer with a summary where it is not one answer without errors."""
    blocks = [answer_lines(answer, layout, report.show_all) for answer in report.answers]
    if len(report.answers) != 1 or report.errors:
        blocks.append(summary_lines([story_of(answer) for answer in report.answers], report.errors, layout))
    return join_blocks(blocks)


def summary_lines(stories: Sequence[Story], errors: Sequence[tuple[str, str]], layout: Layout) -> list[Line]:
    """Returns one line per story and per (source, message) of `errors`, and a count of the outcomes."""
    lines: list[Line] = [[("summary", "bold")]]
    names = columns([[layout.shorten(story.title, _WIDEST)] for story in stories])
    for story, (name,) in zip(stories, names, strict=True):
        lead = f"  {story.outcome.value:<14}"
        summary = f"{story.sentence} (accepted)" if story.accepted else story.sentence
        summary += time_text(story)
        body = layout.wrap(summary, indent=len(lead) + cells(name) + 2)
        body[0][:1] = [(lead, STYLES[story.outcome]), (name + "  ", "")]
        lines += body
    for source, message in errors:
        body = layout.wrap(f"{source}: {message}", indent=2 + 14)
        body[0][0] = (f"  {'error':<14}", "bold red")
        lines += body
    counts = [(sum(story.outcome is outcome for story in stories), outcome.value) for outcome in Outcome]
    failed = len({source for source, _ in errors})  # a spec may have several sentences, and is one run
    counts.append((failed, "error" if failed == 1 else "errors"))
    total = len(stories) + failed
    text = ", ".join(f"{count} {word}" for count, word in counts if count) or "nothing was run"
    seconds = sum(story.seconds for story in stories)
    took = f" in {seconds_text(seconds)}" if seconds else ""
    return lines + layout.wrap(f"{count_text(total, 'run')}{took}: {text}", indent=2)
