"""Answers as JUnit XML for a CI server.

One testsuite for the call, in it one testcase per spec, script or profile: as many tests as were asked for. What
differs in which module stands in a test's text. Divergent is a `failure`. An inconclusive answer is an `error`: servers
show passed and skipped tests as green, and "not decided" must never look like "equivalent".
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from gaverify.amounts import count_text
from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.profile import Row
from gaverify.report.stories import Report, Story, Table, row_name, story_of
from gaverify.report.text.layout import clean
from gaverify.report.text.verdict import rows_of
from gaverify.report.text.wording import number, percent, shape, sort_rows, worst

# every text is made printable: XML has no way to write most control characters, nor the two noncharacters


def junit_text(report: Report) -> str:
    """Returns the document; each source of an error becomes one test with an `error` that holds all its messages."""
    root = ElementTree.Element("testsuites", name="gaverify")
    suite = ElementTree.SubElement(root, "testsuite", name="gaverify")
    stories = [story_of(answer) for answer in report.answers]
    for story in stories:
        suite.append(_test(story))
    for source in dict.fromkeys(source for source, _ in report.errors):
        messages = [message for error_source, message in report.errors if error_source == source]
        test = ElementTree.SubElement(suite, "testcase", classname="gaverify", name=clean(source), time="0.000")
        _child(test, "error", "no-verdict", "; ".join(messages), "\n".join(messages[1:] and messages))
    counts = {"tests": len(suite)}
    counts |= {
        key: len(suite.findall(f"testcase/{tag}")) for key, tag in (("failures", "failure"), ("errors", "error"))
    }
    for element in (root, suite):
        for key, count in counts.items():
            element.set(key, str(count))
        element.set("time", f"{sum(story.seconds for story in stories):.3f}")
    suite.set("skipped", "0")  # Jenkins' schema knows `skipped` and `timestamp` of a suite alone
    if report.started:
        suite.set("timestamp", report.started.partition("+")[0])  # in UTC, and without a zone, as the schema has it
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _test(story: Story) -> ElementTree.Element:
    test = ElementTree.Element("testcase", classname=f"gaverify.{story.kind}", name=clean(story.title))
    test.set("time", f"{story.seconds:.3f}")
    if story.source:
        test.set("file", clean(story.source))
    if story.passed:
        if story.remarks:  # an accepted divergence passes, and is named
            ElementTree.SubElement(test, "system-out").text = "\n".join(map(clean, [*story.remarks, story.sentence]))
    elif story.outcome is Outcome.INCONCLUSIVE:
        _child(test, "error", "inconclusive", story.sentence, _describe_story(story))
    else:  # divergent; or equivalent where something else was expected, or with stale entries under `--strict`
        _child(test, "failure", story.outcome.value, story.sentence, _describe_story(story))
    return test


def modules_of(rows: Iterable[ParameterComparison]) -> list[tuple[str, list[ParameterComparison]]]:
    """Returns (module path, its own parameters) in the order in which the model names them."""
    groups: dict[str, list[ParameterComparison]] = {}
    for row in rows:
        groups.setdefault(row.name.rpartition(".")[0], []).append(row)
    return list(groups.items())


def _module_text(table: Table, module: str, rows: list[ParameterComparison]) -> str:
    """Returns what differs in a module or is open there; "" where all agrees, or where the runs cannot be compared."""
    worst_first = sort_rows(rows)
    outcome = worst_first[0].outcome
    if Outcome.EQUIVALENT in (outcome, table.outcome):
        return ""
    if table.outcome is Outcome.INCONCLUSIVE and outcome is Outcome.DIVERGENT:  # an update that is not judged
        return ""
    name = f"{table.heading}: {module or '(root)'}" if table.heading else module or "(root)"
    alike = [row for row in worst_first if row.outcome is outcome]
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
    return f"{row_name(row)}: {message}"


def _child(case: ElementTree.Element, tag: str, kind: str, message: str, text: str = "") -> None:
    child = ElementTree.SubElement(case, tag, type=kind, message=clean(message))
    child.text = "\n".join(clean(line) for line in text.split("\n")) or None


def _difference(row: ParameterComparison) -> str:
    size = row.relative_difference
    return f"differs by {percent(size)}" if 0 <= size < float("inf") else row.reason or "differs"


def _numbers(row: ParameterComparison) -> list[str]:
    lines = [
        f"shape {shape(row)}, decided by {row.method}",
        f"norm of the full-batch gradient {number(row.reference_norm)}, accumulated {number(row.accumulated_norm)}",
        f"norm of their difference {number(row.difference_norm)}, allowed {number(row.allowed)}",
        f"relative difference {number(row.relative_difference)}, allowed {number(row.relative_allowed)}",
    ]
    lines += [f"worst element, full vs accumulated {worst(row)}"] if row.worst else []
    return [*lines, *([row.reason] if row.reason else [])]


def _describe_story(story: Story) -> str:
    lines = [*filter(None, [story.method]), *story.remarks]
    for finding in story.findings:
        place = f" {finding.location}:" if finding.location and str(finding.location) else ""
        lines.append(f"{finding.code} {finding.name}:{place} {finding.summary}")
        lines += [f"    {label}: {statement}" for label, statement in rows_of(finding)]
    modules = [_module_text(table, *module) for table in story.tables for module in modules_of(table.rows)]
    rows = "\n".join(filter(None, map(_row_text, story.rows)))
    return "\n\n".join(filter(None, ["\n".join(lines), *modules, rows]))
