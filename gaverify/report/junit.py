"""Answers as JUnit XML for a CI server.

One testsuite per spec, script or profile. In it one testcase `verdict`, and one per module: a server shows a few dozen
cases well and truncates the thousands that a case per parameter would be. A case of a profile is a row. Divergent is a
`failure` with its numbers. An inconclusive module is `skipped`; an inconclusive verdict is an `error`, because servers
show a suite of passed and skipped cases as green, and "not decided" must never look like "equivalent".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.profile import Row
from gaverify.report.stories import Report, Story, Table, row_name, story_of
from gaverify.report.text.layout import clean
from gaverify.report.text.verdict import rows_of
from gaverify.report.text.wording import number, ordered, percent, shape, worst

# every text is made printable: XML has no way to write most control characters, nor the two noncharacters
_TAGS = {Outcome.DIVERGENT: "failure", Outcome.INCONCLUSIVE: "skipped"}


@dataclass(frozen=True)
class _Case:
    name: str
    outcome: Outcome | None
    message: str = ""
    text: str = ""


def junit_text(report: Report) -> str:
    """Returns the document; each source of an error becomes a suite with one `error` that holds all its messages."""
    root = ElementTree.Element("testsuites", name="gaverify")
    for answer in report.answers:
        root.append(_suite(story_of(answer)))
    for source in dict.fromkeys(source for source, _ in report.errors):
        messages = [message for told, message in report.errors if told == source]
        suite = ElementTree.SubElement(root, "testsuite", name=clean(source))
        case = ElementTree.SubElement(suite, "testcase", classname=clean(source), name="verdict", time="0.000")
        _child(case, "error", "no-verdict", "; ".join(messages), "\n".join(messages[1:] and messages))
        _count(suite)
    for key in ("tests", "failures", "errors"):  # Jenkins' schema knows `skipped` of a suite alone
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(story: Story) -> ElementTree.Element:
    name, seconds = clean(story.title), f"{story.seconds:.3f}"
    suite = ElementTree.Element("testsuite", name=name, time=seconds)
    case = ElementTree.SubElement(suite, "testcase", classname=name, name="verdict", time=seconds)
    if story.passed:
        if story.remarks:  # an accepted divergence passes, and is named
            ElementTree.SubElement(case, "system-out").text = "\n".join(map(clean, [*story.remarks, story.sentence]))
    elif story.outcome is Outcome.INCONCLUSIVE:
        _child(case, "error", "inconclusive", story.sentence, _told(story))
    else:  # divergent; or equivalent where something else was expected, or with stale entries under `--strict`
        _child(case, "failure", story.outcome.value, story.sentence, _told(story))
    for part in _cases(story):
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=clean(part.name), time="0.000")
        if part.outcome in _TAGS and not story.passed:
            _child(case, _TAGS[part.outcome], part.outcome.value, part.message, part.text)
    _count(suite)
    return suite


def _cases(story: Story) -> Iterator[_Case]:
    for table in story.tables:
        for module, rows in modules_of(table.rows):
            yield _module_case(table, module, rows)
    for row in story.rows:
        yield _row_case(row)


def modules_of(rows: Iterable[ParameterComparison]) -> list[tuple[str, list[ParameterComparison]]]:
    """Returns (module path, its own parameters) in the order in which the model names them."""
    groups: dict[str, list[ParameterComparison]] = {}
    for row in rows:
        groups.setdefault(row.name.rpartition(".")[0], []).append(row)
    return list(groups.items())


def _module_case(table: Table, module: str, rows: list[ParameterComparison]) -> _Case:
    name = f"{table.heading}: {module or '(root)'}" if table.heading else module or "(root)"
    worst_first = ordered(rows)
    outcome = worst_first[0].outcome
    if outcome is Outcome.EQUIVALENT or table.outcome is Outcome.EQUIVALENT:
        return _Case(name, Outcome.EQUIVALENT)
    if table.outcome is Outcome.INCONCLUSIVE and outcome is Outcome.DIVERGENT:  # an update that is not judged
        return _Case(name, Outcome.INCONCLUSIVE, "the runs cannot be compared here")
    alike = [row for row in worst_first if row.outcome is outcome]
    if outcome is Outcome.INCONCLUSIVE:
        return _Case(name, outcome, alike[0].reason or "could not be decided", "\n".join(row.name for row in alike))
    message = f"{len(alike)} of {len(rows)} parameters: `{alike[0].name}` {_difference(alike[0])}"
    return _Case(name, outcome, message, "\n\n".join(f"{row.name}\n{_numbers(row)}" for row in alike))


def _row_case(row: Row) -> _Case:
    if row.status == "failed":
        return _Case(row_name(row), Outcome.DIVERGENT, row.message)
    undecided = row.outcome is Outcome.INCONCLUSIVE or row.status != "measured"
    message = row.message or (f"differs by {percent(row.relative_difference)}" if row.relative_difference else "")
    return _Case(row_name(row), Outcome.INCONCLUSIVE if undecided else row.outcome, message or row.status)


def _child(case: ElementTree.Element, tag: str, kind: str, message: str, text: str = "") -> None:
    child = ElementTree.SubElement(case, tag, type=kind, message=clean(message))
    child.text = "\n".join(clean(line) for line in text.split("\n")) or None


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


def _told(story: Story) -> str:
    lines = [*filter(None, [story.method]), *story.remarks]
    for finding in story.findings:
        place = f" {finding.location}:" if finding.location and str(finding.location) else ""
        lines.append(f"{finding.code} {finding.name}:{place} {finding.summary}")
        lines += [f"    {label}: {statement}" for label, statement in rows_of(finding)]
    return "\n".join(lines)
