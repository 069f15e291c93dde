"""What the page shows of an answer, as plain values for the template, which makes texts printable and escapes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from markupsafe import Markup

from gaverify.records.audit_report import AuditReport, Moment
from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.findings import Finding
from gaverify.records.verdict import Verdict
from gaverify.report.junit import modules_of
from gaverify.report.page.charts import (
    ModuleView,
    bars_chart,
    by_outputs,
    by_parameters,
    first_to_differ,
    parameters_chart,
    weights_chart,
)
from gaverify.report.plot import profile_svg
from gaverify.report.stories import Answer, Story, Table, story_of
from gaverify.report.text.layout import clean
from gaverify.report.text.verdict import kind_of, rows_of, told
from gaverify.report.text.wording import PROFILE, measures, number, ordered, profile_cells, worst


@dataclass(frozen=True)
class FindingView:
    """A finding with its line in the source and what the control run left of the difference."""

    finding: Finding
    kind: str
    summary: str
    where: str
    rows: Sequence[tuple[str, str]]
    lines: Sequence[tuple[int, str, bool]]
    chart: Markup


@dataclass(frozen=True)
class TableView:
    """The parameters of one comparison, worst first, and their chart."""

    heading: str
    rows: Sequence[tuple[str, ...]]
    chart: Markup
    modules: Sequence[ModuleView]
    begins: str
    elsewhere: Sequence[str]
    starred: bool


@dataclass(frozen=True)
class AnswerView:
    """One answer: its story, and what only a page shows; `timeline` are the calls of a script by update and rank.

    `forward_of`: of how many samples the modules' outputs were, where they were those of a part of the batch.
    """

    story: Story
    findings: Sequence[FindingView]
    tables: Sequence[TableView]
    forward: Sequence[ModuleView] = ()
    forward_begins: str = ""
    forward_of: int = 0
    weights: Sequence[tuple[str, Markup]] = ()
    timeline: Sequence[tuple[str, Sequence[tuple[str, str, int, str]]]] = ()
    plot: Markup = field(default_factory=lambda: Markup(""))
    columns: Sequence[str] = (*PROFILE, "message")
    profile: Sequence[tuple[str, ...]] = ()


def view_of(answer: Answer) -> AnswerView:
    """Returns what the page shows of `answer`."""
    story = story_of(answer)
    before = max((_largest(table.rows) for table in story.tables), default=0.0)
    culprits = {finding.location.module for finding in story.findings if finding.location and finding.location.module}
    view = AnswerView(
        story,
        findings=[_finding(finding, before) for finding in story.findings],
        tables=[_table(table, culprits) for table in story.tables],
    )
    if isinstance(answer, Verdict):
        return replace(
            view,
            forward=list(by_outputs(answer.modules, culprits)),
            forward_begins=first_to_differ(answer.modules),
            forward_of=sum(answer.run.part),
            weights=list(_fitted(answer)),
        )
    if isinstance(answer, AuditReport):
        fits = [(f"update {update.number}", update.fit) for update in answer.updates]
        weights = [(heading, weights_chart(fit.used, fit.weights)) for heading, fit in fits if fit and fit.weights]
        return replace(view, weights=weights, timeline=list(_timeline(answer.timeline)))
    return replace(
        view,
        plot=Markup(profile_svg(answer)) if answer.rows else Markup(""),
        profile=[(*profile_cells(row), row.message) for row in answer.rows],
    )


def _largest(rows: Iterable[ParameterComparison]) -> float:
    sizes = [row.relative_difference for row in rows if row.outcome is Outcome.DIVERGENT]
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def _finding(finding: Finding, before: float) -> FindingView:
    summary, where = told(finding)
    place = finding.location
    lines: list[tuple[int, str, bool]] = []
    if place is not None and place.excerpt is not None:
        numbered = enumerate(place.excerpt.lines, place.excerpt.first)
        lines = [(at, text.expandtabs(4), at == place.line) for at, text in numbered]
        where = where or f"{place.file}:{place.line}"
    chart = _before_and_after(finding, before)
    return FindingView(finding, kind_of(finding), summary, where, rows_of(finding), lines, chart)


def _before_and_after(finding: Finding, before: float) -> Markup:
    """The difference as the user's code makes it, without the suspect in both runs, and with each repair that ran.

    All are differences of the whole gradient. `difference` stands in other evidence as well, where it is that of the
    values of the forward; `before` is the largest of a parameter, for want of the whole gradient's.
    """
    values = [evidence.values for evidence in finding.evidence]
    left = next((_number(v.get("left", v.get("residual"))) for v in values if "left" in v or "residual" in v), math.nan)
    harm = [_number(e.values.get("difference")) for e in finding.evidence if e.probe == "harm"]
    alone = [_number(v.get("alone")) for v in values if "left" in v]
    own = next((size for size in (*harm, *alone) if size > 0), before)
    if math.isnan(left) or not own > 0:
        return Markup("")
    whole = "as it is" if own is before else "whole gradient, as it is"
    bars = [(whole, own, "divergent"), ("control run", left, "equivalent" if finding.proven else "inconclusive")]
    for repair in next((v["repairs"] for v in values if "repairs" in v), ()):
        kind = "equivalent" if repair["rounding"] else "inconclusive"
        bars.append((f"repair: {clean(str(repair['what']))}", _number(repair["left"]), kind))
    return bars_chart(bars, "Relative difference, " + ", ".join(f"{text}: {number(size)}" for text, size, _ in bars))


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _table(table: Table, culprits: set[str]) -> TableView:
    rows = [_cells(row) for row in ordered(table.rows)]
    modules = list(by_parameters(table.rows, culprits))
    begins = next((m.name for m in modules if m.outcome == Outcome.DIVERGENT.value), "")
    known = {name for name, _ in modules_of(table.rows)}
    elsewhere = sorted(clean(name) for name in culprits - known)
    starred = any(row.vanishing for row in table.rows)
    return TableView(table.heading, rows, parameters_chart(table.rows), modules, begins, elsewhere, starred)


def _cells(row: ParameterComparison) -> tuple[str, ...]:
    return (
        row.name or "(unnamed)",
        *measures(row),
        number(row.working_difference_norm),
        row.outcome.value,
        str(row.method),
        worst(row) or row.reason,
    )


def _fitted(verdict: Verdict) -> Iterator[tuple[str, Markup]]:
    fits = (evidence.values.get("weights") for finding in verdict.findings for evidence in finding.evidence)
    fitted = next((fit for fit in fits if isinstance(fit, (list, tuple)) and fit), None)
    if fitted is not None:
        yield "", weights_chart(verdict.run.weights, [_number(weight) for weight in fitted])


def _timeline(moments: Sequence[Moment]) -> Iterator[tuple[str, list[tuple[str, str, int, str]]]]:
    """(update and rank, its calls in order); equal calls behind one another are one with their count."""
    several = len({moment.rank for moment in moments}) > 1
    in_order = sorted(moments, key=lambda moment: (moment.update, moment.rank))  # stable: calls keep their order
    for (update, rank), calls in groupby(in_order, key=lambda moment: (moment.update, moment.rank)):
        heading = f"update {update}, rank {rank}" if several else f"update {update}"
        yield heading, [_calls(list(run)) for _, run in groupby(calls, key=lambda call: (call.kind, call.line))]


def _calls(run: list[Moment]) -> tuple[str, str, int, str]:
    first = run[0]
    place = f"{first.file}:{first.line}" if first.file and first.line else first.file or ""
    return first.kind, first.kind.replace("_", "-"), len(run), place
