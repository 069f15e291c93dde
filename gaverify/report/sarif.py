"""SARIF 2.1.0: findings at their lines, for code scanning and editors.

One run holds all answers. A result is a finding; a divergence without a finding and an inconclusive answer are results,
too, because a service shows a run without results as clean. Errors are notifications of the invocation.

Source: OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0, sections 3.13 to 3.58.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from gaverify.records.comparison import Outcome
from gaverify.records.findings import Finding
from gaverify.report.blocks import FindingBlock, Page
from gaverify.report.common_blocks import finding_blocks
from gaverify.report.layout import clean
from gaverify.report.pages import Place, Report, findings_at_lines, page_of, place_of
from gaverify.rulebook import RulePage, rule_pages
from gaverify.tracebacks import portable
from gaverify.version import HOME, __version__

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_UNEXPLAINED = "GAV000"
_UNDECIDED = "inconclusive"


def sarif_text(report: Report) -> str:
    """Returns the log file."""
    pages = [page_of(answer) for answer in report.answers]
    occurrences: Counter[str] = Counter()
    results = [
        _result(page, block, occurrences)
        for page in pages
        for block in findings_at_lines(page) or finding_blocks(_stand_ins(page), ())
    ]
    rules = {page.code: page for page in rule_pages()}
    codes = sorted({result["ruleId"] for result in results})
    for result in results:
        result["ruleIndex"] = codes.index(result["ruleId"])
    driver = {
        "name": "gaverify",
        "version": __version__,
        "semanticVersion": __version__,
        "informationUri": HOME,
        "rules": [_rule(code, rules.get(code)) for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(report)],
        # Python counts characters, not UTF-16 units
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {"answers": [_name_and_outcome("title", page) for page in pages]},
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=True) + "\n"


def _name_and_outcome(key: str, page: Page) -> dict[str, str]:
    return {key: clean(page.headline.title), "outcome": page.headline.outcome.value}


def _stand_ins(page: Page) -> Iterator[Finding]:
    """A finding for an answer that has none and is not equivalent."""
    headline = page.headline
    if headline.outcome is Outcome.DIVERGENT:
        yield Finding(_UNEXPLAINED, "unexplained", "fault", headline.sentence)
    elif headline.outcome is Outcome.INCONCLUSIVE and not headline.passed:
        yield Finding(_UNDECIDED, _UNDECIDED, "fault", headline.sentence)


def _result(page: Page, block: FindingBlock, seen: Counter[str]) -> dict[str, Any]:
    finding = block.finding
    place = place_of(finding, page)
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "level": _level(finding),
        "message": {"text": _message(page, block)},
        "locations": _locations(finding, place),
        "partialFingerprints": {"gaverify/v1": _fingerprint(page, finding, place, seen)},
        "properties": {"proven": finding.proven, **_name_and_outcome("answer", page)},
    }
    if finding.accepted:
        result["suppressions"] = [{"kind": "external", "justification": clean(finding.accepted)}]
    return {key: value for key, value in result.items() if value != []}


def _level(finding: Finding) -> str:
    if finding.severity == "note":
        return "note"
    return "error" if finding.proven else "warning"


def _message(page: Page, block: FindingBlock) -> str:
    parts = [f"{label}: {statement}" for label, statement in block.rows]
    return "\n".join(map(clean, [block.finding.summary or page.headline.sentence, *parts]))


def _locations(finding: Finding, place: Place | None) -> list[dict[str, Any]]:
    location: dict[str, Any] = {}
    if place is not None:
        path = quote(place.path, errors="replace")
        artifact = {"uri": path} if place.inside else {"uri": "file://" + path}
        if place.inside:
            artifact["uriBaseId"] = "%SRCROOT%"
        region: dict[str, Any] = {"startLine": place.line}
        if place.text:
            region["snippet"] = {"text": clean(place.text)}
        location["physicalLocation"] = {"artifactLocation": artifact, "region": region}
    where = finding.location
    if where is not None and where.module is not None:
        name = clean(where.module) or "(root)"
        location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "module"}]
    return [location] if location else []


def _fingerprint(page: Page, finding: Finding, place: Place | None, seen: Counter[str]) -> str:
    """A hash of what stays when lines move: code, file, module and the line's text; equal ones are numbered."""
    where = finding.location
    parts = [finding.code, (where.module if where else None) or ""]
    if place is None:
        parts.append(page.headline.title)
    else:  # a library's folder is another one on every machine
        parts += [place.path if place.inside else portable(place.path), " ".join(place.text.split())]
    key = "\0".join(parts)
    seen[key] += 1
    return hashlib.sha256(f"{key}\0{seen[key]}".encode("utf-8", "backslashreplace")).hexdigest()


def _rule(code: str, page: RulePage | None) -> dict[str, Any]:
    if page is None:
        text = "The answer is inconclusive: nothing was decided, which is no sign that all is well."
        return {"id": code, "shortDescription": {"text": text}, "help": {"text": text}}
    body = "\n\n".join(f"{heading}\n\n{text}" for heading, text in page.sections.items())
    markdown = "\n\n".join(f"## {heading}\n\n{_markdown(text)}" for heading, text in page.sections.items())
    return {
        "id": code,
        "name": "".join(part.capitalize() for part in page.name.split("-")),
        "shortDescription": {"text": page.summary},
        "fullDescription": {"text": page.summary},
        "helpUri": f"{HOME}/blob/v{__version__}/gaverify/rules/pages/{page.code}.md",
        "help": {"text": f"{page.code} {page.name}: {page.summary}\n\n{body}", "markdown": markdown},
        "defaultConfiguration": {"level": "note" if page.severity == "note" else "error"},
        "properties": {"tags": ["gradient-accumulation", page.name]},
    }


def _markdown(text: str) -> str:
    """A section of a rule page; its indented lines are code in Markdown already once a blank line precedes them."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("    ") and lines and lines[-1] and not lines[-1].startswith("    "):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _invocation(report: Report) -> dict[str, Any]:
    invocation: dict[str, Any] = {"executionSuccessful": not report.errors}
    commands = list(dict.fromkeys(answer.command for answer in report.answers if answer.command))
    if len(commands) == 1:
        invocation["commandLine"] = clean(commands[0])
    if report.errors:
        invocation["toolExecutionNotifications"] = [
            {"level": "error", "message": {"text": clean(f"{source}: {message}")}} for source, message in report.errors
        ]
    return invocation
