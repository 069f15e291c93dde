"""Answers as JUnit XML for a CI server.

One testsuite for the call, in it one testcase per spec, script or profile: as many tests as were asked for. What
differs in which module stands in a test's text. Divergent is a `failure`. An inconclusive answer is an `error`: servers
show passed and skipped tests as green, and "not decided" must never look like "equivalent".
"""

from __future__ import annotations

from xml.etree import ElementTree

from gaverify.amounts import count_text
from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.profile import LABELS, Row
from gaverify.report.blocks import Page, Parameters
from gaverify.report.layout import clean
from gaverify.report.pages import Report, page_of
from gaverify.report.wording import modules_of, number, percent, shape, sort_rows, worst

# every text is made printable: XML has no way to write most control characters, nor the two noncharacters


def junit_text(report: Report) -> str:
    """Returns the document; each source of an error becomes one test with an `error` that holds all its messages."""
    root = ElementTree.Element("testsuites", name="gaverify")
    suite = ElementTree.SubElement(root, "testsuite", name="gaverify")
    pages = [page_of(answer) for answer in report.answers]
    suite.extend(map(_test, pages))
    # a spec with several errors was asked for once, and is one test
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
        element.set("time", f"{sum(page.seconds for page in pages):.3f}")
    suite.set("skipped", "0")  # Jenkins' schema knows `skipped` and `timestamp` of a suite alone
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
    return "\n\n".join(filter(None, ["\n".join(lines), *modules, rows]))
