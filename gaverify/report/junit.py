"""Verdicts as JUnit XML for a CI server.

One testsuite per verdict, in it one testcase `verdict` and one testcase per parameter. Divergent is a `failure` with
its numbers. An inconclusive parameter is `skipped`; an inconclusive verdict is an `error`, because servers show a
suite of passed and skipped cases as green, and "not decided" must never look like "equivalent".
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from gaverify.report.layout import Layout
from gaverify.report.wording import method, number, percent, sentence, shape, worst
from gaverify.results import Outcome, ParameterComparison, Verdict

_LAYOUT = Layout(width=120)


def junit_text(verdicts: Sequence[Verdict], errors: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the document; each (source, message) of `errors` becomes a suite with one `error`."""
    root = ElementTree.Element("testsuites", name="gaverify")
    for verdict in verdicts:
        root.append(_suite(verdict))
    for source, message in errors:
        suite = ElementTree.SubElement(root, "testsuite", name=_clean(source))
        case = ElementTree.SubElement(suite, "testcase", classname=_clean(source), name="verdict", time="0.000")
        _child(case, "error", "no-verdict", message)
        _count(suite)
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(verdict: Verdict) -> ElementTree.Element:
    name = _clean(verdict.run.model)
    seconds = verdict.timings.get("total", 0.0)
    suite = ElementTree.Element("testsuite", name=name, time=f"{seconds:.3f}")
    case = ElementTree.SubElement(suite, "testcase", classname=name, name="verdict", time=f"{seconds:.3f}")
    if verdict.outcome is Outcome.DIVERGENT:
        _child(case, "failure", "divergent", sentence(verdict), _story(verdict))
    elif verdict.outcome is Outcome.INCONCLUSIVE:
        _child(case, "error", "inconclusive", sentence(verdict), _story(verdict))
    for row in verdict.parameters:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=_clean(row.name), time="0.000")
        if row.outcome is Outcome.DIVERGENT:
            _child(case, "failure", "divergent", _difference(row), _numbers(row))
        elif row.outcome is Outcome.INCONCLUSIVE:
            _child(case, "skipped", "inconclusive", row.reason or "could not be decided")
    _count(suite)
    return suite


def _child(case: ElementTree.Element, tag: str, kind: str, message: str, text: str = "") -> None:
    child = ElementTree.SubElement(case, tag, type=kind, message=_clean(message))
    child.text = "\n".join(_clean(line) for line in text.split("\n")) or None


def _count(suite: ElementTree.Element) -> None:
    suite.set("tests", str(len(suite)))
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(len(suite.findall(f"testcase/{tag}"))))


def _difference(row: ParameterComparison) -> str:
    size = row.relative_difference
    return f"differs by {percent(size)}" if 0 <= size < float("inf") else row.reason or "differs"


def _numbers(row: ParameterComparison) -> str:
    lines = [
        f"shape {shape(row)}, decided by {row.method}",
        f"norm of the full-batch gradient {number(row.reference_norm)}, accumulated {number(row.accumulated_norm)}",
        f"norm of their difference {number(row.difference_norm)}, allowed {number(row.allowed)}",
        f"relative difference {number(row.relative_difference)}, allowed {number(row.relative_allowed)}",
    ]
    lines += [f"worst element, full vs accumulated {worst(row)}"] if row.worst else []
    return "\n".join([*lines, *([row.reason] if row.reason else [])])


def _story(verdict: Verdict) -> str:
    lines = [method(verdict)]
    for finding in verdict.findings:
        place = f" {finding.location}:" if finding.location and str(finding.location) else ""
        lines.append(f"{finding.code} {finding.name}:{place} {finding.summary}")
        lines += [f"    {evidence.label}: {evidence.statement}" for evidence in finding.evidence]
        lines += [f"    remedy: {finding.remedy}"] if finding.remedy else []
    return "\n".join(lines)


def _clean(text: str) -> str:
    # XML has no way to write most control characters; the two noncharacters count as unprintable, too.
    return _LAYOUT.text(text)
