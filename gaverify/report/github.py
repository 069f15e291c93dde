"""Annotations that GitHub Actions reads from a job's output.

Source: GitHub Docs, "Workflow commands for GitHub Actions", setting a notice, warning or error message.
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.comparison import Outcome
from gaverify.records.findings import Finding
from gaverify.report.stories import Report, Story, findings_at_lines, place_of, story_of
from gaverify.report.text.layout import clean


def annotations_text(report: Report) -> str:
    """Returns one workflow command per finding, per answer without a finding that is not equivalent, and per error."""
    lines = [line for answer in report.answers for line in _story(story_of(answer))]
    lines += [_command("error", {"title": f"gaverify: {source}"}, message) for source, message in report.errors]
    return "".join(line + "\n" for line in lines)


def _story(story: Story) -> Iterator[str]:
    has_annotation = False
    for finding in findings_at_lines(story):
        has_annotation = has_annotation or finding.severity == "fault"
        yield _annotation(
            _level(finding, story), f"{finding.code} {finding.name} ({story.title})", _message(finding), finding, story
        )
    if story.outcome is not Outcome.EQUIVALENT and not has_annotation and not story.passed:
        level = "error" if story.outcome is Outcome.DIVERGENT else "warning"
        yield _annotation(level, f"gaverify: {story.outcome.value} ({story.title})", story.sentence, None, story)
    for sentence in story.remarks:
        yield _annotation("notice" if story.passed else "warning", f"gaverify ({story.title})", sentence, None, story)


def _level(finding: Finding, story: Story) -> str:
    if finding.severity == "note" or finding.accepted or story.passed:
        return "notice"
    return "error" if finding.proven else "warning"


def _message(finding: Finding) -> str:
    parts = [f"accepted: {finding.accepted}"] if finding.accepted else []
    parts += [finding.summary, *(f"remedy: {remedy}" for remedy in [finding.remedy] if remedy)]
    return "\n".join(clean(part) for part in parts)


def _annotation(level: str, title: str, message: str, finding: Finding | None, story: Story) -> str:
    place = place_of(finding, story)
    fields = {"file": place.path, "line": str(place.line)} if place is not None and place.inside else {}
    return _command(level, {**fields, "title": title}, message)


def _command(level: str, fields: dict[str, str], message: str) -> str:
    """A workflow command; what would end a field or the line is written as GitHub's runner decodes it."""
    listed = ",".join(f"{key}={_escape_text(clean(value), True)}" for key, value in fields.items())
    return f"::{level} {listed}::{_escape_text(message, False)}"


def _escape_text(text: str, field: bool) -> str:
    marks = {"%": "%25", "\r": "%0D", "\n": "%0A"} | ({":": "%3A", ",": "%2C"} if field else {})
    return "".join(marks.get(character, character) for character in text)
