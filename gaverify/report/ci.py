"""Formats for CI services: JUnit XML, SARIF 2.1.0 for code scanning and editors, annotations of GitHub Actions."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from gaverify.records.answers import Answer
from gaverify.records.findings import Finding
from gaverify.records.numbers import count_text
from gaverify.records.outcomes import Outcome, ParameterComparison
from gaverify.records.patch import Edit
from gaverify.records.profile import LABELS, Row
from gaverify.report.blocks import FindingBlock, Page, Parameters
from gaverify.report.common_blocks import finding_blocks
from gaverify.report.layout import clean, modules_of, number, percent, shape, sort_rows, worst
from gaverify.report.pages import (
    Place,
    Report,
    Unanswered,
    findings_at_lines,
    page_of,
    place_of,
    place_of_line,
)
from gaverify.rulebook import RulePage, rule_pages
from gaverify.tracebacks import portable
from gaverify.version import HOME, __version__

# Answers as JUnit XML for a CI server.
#
# One testsuite for the call, in it one testcase per spec, script or profile: as many tests as were asked for. A test's
# text says which module differs and how. Divergent is a `failure`. An inconclusive answer is an `error`: servers show
# passed and skipped tests as green, and "not decided" must never look like "equivalent".
# Every text is made printable: XML has no way to write most control characters, nor the two noncharacters.


def junit_text(report: Report) -> str:
    """Returns the document: a test for each run, in the order in which they were asked for."""
    root = ElementTree.Element("testsuites", name="gaverify")
    suite = ElementTree.SubElement(root, "testsuite", name="gaverify")
    pages = [page_of(answer) for answer in report.answers]
    suite.extend(_test(run) if isinstance(run, Page) else _no_test(run) for run in report.list_runs(pages))
    tags = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counts = {"tests": len(suite), **{key: len(suite.findall(f"testcase/{tag}")) for key, tag in tags.items()}}
    skipped = counts.pop("skipped")
    for element in (root, suite):
        for key, count in counts.items():
            element.set(key, str(count))
        element.set("time", f"{sum(page.seconds for page in pages):.3f}")
    suite.set("skipped", str(skipped))  # Jenkins' schema knows `skipped` and `timestamp` of a suite alone
    if report.started:
        suite.set("timestamp", report.started.partition("+")[0])  # in UTC, and without a zone, as the schema has it
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _test(page: Page) -> ElementTree.Element:
    headline = page.headline
    test = ElementTree.Element("testcase", classname=f"gaverify.{page.kind}", name=clean(headline.title))
    test.set("time", f"{page.seconds:.3f}")
    if page.source:
        test.set("file", clean(page.source))
    if headline.passed:
        if headline.remarks:  # an accepted divergence passes, and is named
            remarks = "\n".join(map(clean, [*headline.remarks, headline.sentence]))
            ElementTree.SubElement(test, "system-out").text = remarks
    elif headline.outcome is Outcome.INCONCLUSIVE:
        _child(test, "error", "inconclusive", headline.sentence, _describe_page(page))
    else:  # divergent; or equivalent where something else was expected, or with stale entries under `--strict`
        _child(test, "failure", headline.outcome.value, headline.sentence, _describe_page(page))
    return test


def _no_test(run: Unanswered) -> ElementTree.Element:
    """Returns the test of a run without an answer, which holds all the reasons why."""
    test = ElementTree.Element("testcase", classname="gaverify", name=clean(run.source), time="0.000")
    kind = "no-verdict" if run.word == "error" else "skipped"
    _child(test, run.word, kind, "; ".join(run.messages), "\n".join(run.messages[1:] and run.messages))
    return test


def _module_text(table: Parameters, module: str, rows: list[ParameterComparison]) -> str:
    """Returns what differs in a module or is open there; "" where all agrees, or where the runs cannot be compared."""
    worst_first = sort_rows(rows)
    outcome = worst_first[0].outcome
    if Outcome.EQUIVALENT in (outcome, table.outcome):
        return ""
    if table.outcome is Outcome.INCONCLUSIVE and outcome is Outcome.DIVERGENT:  # an update that is not judged
        return ""
    name = f"{table.name}: {module or '(root)'}" if table.name else module or "(root)"
    alike = [row for row in worst_first if row.outcome is outcome]
    # an undecided parameter has a reason where others have a difference
    if outcome is Outcome.INCONCLUSIVE:
        reason = alike[0].reason or "could not be decided"
        return f"{name}: {reason}: {', '.join(row.name for row in alike)}"
    heading = f"{name}: {len(alike)} of {count_text(len(rows), 'parameter')}: `{alike[0].name}` {_difference(alike[0])}"
    return "\n".join([heading, *(f"{row.name}\n    " + "\n    ".join(_numbers(row)) for row in alike)])


def _row_text(row: Row) -> str:
    if row.status == "measured" and row.outcome is Outcome.EQUIVALENT:
        return ""
    message = row.message or (
        f"differs by {percent(row.relative_difference)}" if row.relative_difference else row.status
    )
    return f"{LABELS[row.strategy]}, K = {row.steps}: {message}"


def _child(case: ElementTree.Element, tag: str, kind: str, message: str, text: str = "") -> None:
    child = ElementTree.SubElement(case, tag, type=kind, message=clean(message))
    child.text = "\n".join(clean(line) for line in text.split("\n")) or None


def _difference(row: ParameterComparison) -> str:
    size = row.relative_difference
    return f"differs by {number(size)} (relative)" if 0 <= size < float("inf") else row.reason or "differs"


def _numbers(row: ParameterComparison) -> list[str]:
    lines = [
        f"shape {shape(row)}, decided by {row.method}",
        f"norm of the full-batch gradient {number(row.reference_norm)}, accumulated {number(row.accumulated_norm)}",
        f"norm of their difference {number(row.difference_norm)}, allowed {number(row.allowed)}",
        f"relative difference {number(row.relative_difference)}, allowed {number(row.relative_allowed)}",
    ]
    lines += [f"worst element, full vs accumulated {worst(row)}"] if row.worst else []
    return [*lines, *([row.reason] if row.reason else [])]


def _describe_page(page: Page) -> str:
    lines = [*filter(None, [page.headline.method]), *page.headline.remarks]
    for block in page.findings:
        finding = block.finding
        lines.append(f"{finding.code} {finding.name}: {block.summary}" + (f" ({block.place})" if block.place else ""))
        lines += [f"    {label}: {statement}" for label, statement in block.rows]
    modules = [_module_text(table, *module) for table in page.comparisons for module in modules_of(table.rows)]
    rows = "\n".join(filter(None, map(_row_text, page.profile_rows)))
    return "\n\n".join(filter(None, ["\n".join(lines), *modules, rows, *_describe_patch(page)]))


def _describe_patch(page: Page) -> Iterator[str]:
    if page.patch is not None:
        yield "\n".join(f"{label}: {text}" for label, text in page.patch.rows)
        yield page.patch.diff


# SARIF 2.1.0: findings at their lines, for code scanning and editors.
#
# One run holds all answers. A result is a finding; a divergence without a finding and an inconclusive answer are
# results, too, because a service shows a run without results as clean. Errors are notifications of the invocation.
#
# Source: OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0, sections 3.13 to 3.58.


_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_UNEXPLAINED = "GAV000"
_UNDECIDED = "inconclusive"


def sarif_text(report: Report) -> str:
    """Returns the log file."""
    pages = [page_of(answer) for answer in report.answers]
    occurrences: Counter[str] = Counter()
    results = [
        {**_result(page, block, occurrences), **_fixes(answer, block.finding)}
        for answer, page in zip(report.answers, pages, strict=True)
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
    rows = [f"{label}: {statement}" for label, statement in block.rows]
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "level": _sarif_level(finding),
        "message": {"text": "\n".join(map(clean, [finding.summary or page.headline.sentence, *rows]))},
        "locations": _locations(finding, place),
        "partialFingerprints": {"gaverify/v1": _fingerprint(page, finding, place, seen)},
        "properties": {"proven": finding.proven, **_name_and_outcome("answer", page)},
    }
    if finding.accepted:
        result["suppressions"] = [{"kind": "external", "justification": clean(finding.accepted)}]
    return {key: value for key, value in result.items() if value != []}


def _fixes(answer: Answer, finding: Finding) -> dict[str, Any]:
    """Returns the key `fixes` of a result where a patch repairs its finding; of all others nothing."""
    patch = answer.patch
    if patch is None or finding.code not in patch.codes:
        return {}
    changes = [
        {"artifactLocation": _artifact(place_of_line(file, 1)), "replacements": [*map(_replacement, edits)]}
        for file, edits in groupby(sorted(patch.edits, key=lambda edit: edit.file), key=lambda edit: edit.file)
    ]
    fix = {"description": {"text": clean(patch.title)}, "artifactChanges": changes}
    # Tools apply what stands in `fixes` at a click: a reader has to see that this one is not safe.
    if patch.unsafe:
        fix["description"] = {"text": clean(f"{patch.title} (unsafe: {patch.unsafe})")}
    return {"fixes": [fix]}


def _replacement(edit: Edit) -> dict[str, Any]:
    # SARIF counts columns from 1, and an end column lies behind the last character, as that of an edit.
    region = {
        "startLine": edit.first_line,
        "startColumn": edit.first_column + 1,
        "endLine": edit.last_line,
        "endColumn": edit.last_column + 1,
    }
    return {"deletedRegion": region, **({"insertedContent": {"text": edit.text}} if edit.text else {})}


def _sarif_level(finding: Finding) -> str:
    if finding.severity == "note":
        return "note"
    return "error" if finding.proven else "warning"


def _locations(finding: Finding, place: Place | None) -> list[dict[str, Any]]:
    location: dict[str, Any] = {}
    if place is not None:
        region: dict[str, Any] = {"startLine": place.line}
        if place.text:
            region["snippet"] = {"text": clean(place.text)}
        location["physicalLocation"] = {"artifactLocation": _artifact(place), "region": region}
    where = finding.location
    if where is not None and where.module is not None:
        name = clean(where.module) or "(root)"
        location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "module"}]
    return [location] if location else []


def _artifact(place: Place) -> dict[str, str]:
    path = quote(place.path, errors="replace")
    return {"uri": path, "uriBaseId": "%SRCROOT%"} if place.inside else {"uri": "file://" + path}


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
    reasons = [("error", reason) for reason in report.errors] + [("note", reason) for reason in report.skipped]
    if reasons:
        invocation["toolExecutionNotifications"] = [
            {"level": level, "message": {"text": clean(f"{reason.source}: {reason.message}")}}
            for level, reason in reasons
        ]
    return invocation


# Annotations that GitHub Actions reads from a job's output.
#
# Source: GitHub Docs, "Workflow commands for GitHub Actions", setting a notice, warning or error message.


def annotations_text(report: Report) -> str:
    """Returns one workflow command per finding, per answer without a finding that is not equivalent, and per error."""
    lines = [line for answer in report.answers for line in _annotations(page_of(answer))]
    for level, label, reasons in (("error", "", report.errors), ("notice", "skipped: ", report.skipped)):
        lines += [_command(level, {"title": f"gaverify: {label}{each.source}"}, each.message) for each in reasons]
    return "".join(line + "\n" for line in lines)


def _annotations(page: Page) -> Iterator[str]:
    headline, has_annotation = page.headline, False
    for finding in (block.finding for block in findings_at_lines(page)):
        has_annotation = has_annotation or finding.severity == "fault"
        level = _annotation_level(finding, headline.passed)
        yield _annotation(
            level, f"{finding.code} {finding.name} ({headline.title})", _annotation_message(finding), finding, page
        )
    # a finding that is only a note does not say why the job fails
    if headline.outcome is not Outcome.EQUIVALENT and not has_annotation and not headline.passed:
        level = "error" if headline.outcome is Outcome.DIVERGENT else "warning"
        title = f"gaverify: {headline.outcome.value} ({headline.title})"
        yield _annotation(level, title, headline.sentence, None, page)
    for sentence in headline.remarks:
        level = "notice" if headline.passed else "warning"
        yield _annotation(level, f"gaverify ({headline.title})", sentence, None, page)


def _annotation_level(finding: Finding, passed: bool) -> str:
    # what the user accepts or expects must not make a job look broken
    if finding.severity == "note" or finding.accepted or passed:
        return "notice"
    return "error" if finding.proven else "warning"


def _annotation_message(finding: Finding) -> str:
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
    # a line break is the one control character that a message has of its own
    lines = "\n".join(clean(line) for line in message.split("\n"))
    return f"::{level} {listed}::{_escape_text(lines, False)}"


def _escape_text(text: str, field: bool) -> str:
    marks = {"%": "%25", "\r": "%0D", "\n": "%0A"} | ({":": "%3A", ",": "%2C"} if field else {})
    return "".join(marks.get(character, character) for character in text)
