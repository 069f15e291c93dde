"""Annotations that GitHub Actions reads from a job's output.

Source: GitHub Docs, "Workflow commands for GitHub Actions", setting a notice, warning or error message.
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.comparison import Outcome
from gaverify.records.findings import Finding
from gaverify.report.blocks import Page
from gaverify.report.layout import clean
from gaverify.report.pages import Report, findings_at_lines, page_of, place_of


def annotations_text(report: Report) -> str:
    """Returns one workflow command per finding, per answer without a finding that is not equivalent, and per error."""
    lines = [line for answer in report.answers for line in _annotations(page_of(answer))]
    lines += [_command("error", {"title": f"gaverify: {source}"}, message) for source, message in report.errors]
    return "".join(line + "\n" for line in lines)


def _annotations(page: Page) -> Iterator[str]:
    headline, has_annotation = page.headline, False
    for finding in (block.finding for block in findings_at_lines(page)):
        has_annotation = has_annotation or finding.severity == "fault"
        level = _level(finding, headline.passed)
        yield _annotation(level, f"{finding.code} {finding.name} ({headline.title})", _message(finding), finding, page)
    # a finding that is only a note does not say why the job fails
    if headline.outcome is not Outcome.EQUIVALENT and not has_annotation and not headline.passed:
        level = "error" if headline.outcome is Outcome.DIVERGENT else "warning"
        title = f"gaverify: {headline.outcome.value} ({headline.title})"
        yield _annotation(level, title, headline.sentence, None, page)
    for sentence in headline.remarks:
        level = "notice" if headline.passed else "warning"
        yield _annotation(level, f"gaverify ({headline.title})", sentence, None, page)


def _level(finding: Finding, passed: bool) -> str:
    # what the user accepts or expects must not make a job look broken
    if finding.severity == "note" or finding.accepted or passed:
        return "notice"
    return "error" if finding.proven else "warning"


def _message(finding: Finding) -> str:
    parts = [f"accepted: {finding.accepted}"] if finding.accepted else []
    parts += [finding.summary, *(f"remedy: {remedy}" for remedy in [finding.remedy] if remedy)]
    return "\n".join(clean(part) for part in parts)


def _annotation(level: str, title: str, message: str, finding: Finding | None, page: Page) -> str:
    place = place_of(finding, page)
    # GitHub shows no line of a file that is not in the repository
    fields = {"file": place.path, "line": str(place.line)} if place is not None and place.inside else {}
    return _command(level, {**fields, "title": title}, message)


def _command(level: str, fields: dict[str, str], message: str) -> str:
    """A workflow command; what would end a field or the line is written as GitHub's runner decodes it."""
    listed = ",".join(f"{key}={_escape_text(clean(value), True)}" for key, value in fields.items())
    return f"::{level} {listed}::{_escape_text(message, False)}"


def _escape_text(text: str, field: bool) -> str:
    marks = {"%": "%25", "\r": "%0D", "\n": "%0A"} | ({":": "%3A", ",": "%2C"} if field else {})
    return "".join(marks.get(character, character) for character in text)
