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
    BarChart,
    chart_by_outputs,
    chart_by_parameters,
    first_to_differ,
    parameters_chart,
    repairs_chart,
    weights_chart,
)
from gaverify.report.plot import profile_svg
from gaverify.report.stories import Answer, Story, Table, story_of
from gaverify.report.text.layout import clean
from gaverify.report.text.verdict import kind_of, rows_of, summary_and_place
from gaverify.report.text.wording import PROFILE, measures, number, profile_cells, sort_rows, worst


@dataclass(frozen=True)
class FindingView:
    """A finding with its line in the source and what the control run left of the difference."""

    finding: Finding
    kind: str
    summary: str
    where: str
    rows: Sequence[tuple[str, str]]
    lines: Sequence[tuple[int, str, bool]]
    chart: BarChart


@dataclass(frozen=True)
class TableView:
    """The parameters of one comparison, worst first, and their chart."""

    heading: str
    rows: Sequence[tuple[str, ...]]
    chart: BarChart
    modules: BarChart
    begins: str
    elsewhere: Sequence[str]
    starred: bool
    last_column: str
    """What stands behind the outcome: why a parameter was not compared, and with `-v` its worst element."""


@dataclass(frozen=True)
class AnswerView:
    """One answer: its story, and what only a page shows; `timeline` are the calls of a script by update and rank.

    `forward_of`: of how many samples the modules' outputs were, where they were those of a part of the batch.
    """

    story: Story
    findings: Sequence[FindingView]
    tables: Sequence[TableView]
    forward: BarChart = field(default_factory=BarChart)
    forward_begins: str = ""
    forward_of: int = 0
    weights: Sequence[tuple[str, BarChart]] = ()
    timeline: Sequence[tuple[str, Sequence[Repeated]]] = ()
    plot: Markup = field(default_factory=lambda: Markup(""))
    columns: Sequence[str] = (*PROFILE, "message")
    profile: Sequence[tuple[str, ...]] = ()


def view_of(answer: Answer, show_all: bool = False) -> AnswerView:
    """Returns what the page shows of `answer`; with `show_all` also the worst element of each parameter."""
    story = story_of(answer)
    before = max((_largest(table.rows) for table in story.tables), default=0.0)
    culprits = {finding.location.module for finding in story.findings if finding.location and finding.location.module}
    view = AnswerView(
        story,
        findings=[_finding(finding, before) for finding in story.findings],
        tables=[_table(table, culprits, show_all) for table in story.tables],
    )
    if isinstance(answer, Verdict):
        return replace(
            view,
            forward=chart_by_outputs(answer.modules, culprits),
            forward_begins=first_to_differ(answer.modules, culprits),
            forward_of=sum(answer.run.part),
            weights=list(_chart_fitted_weights(answer)),
        )
    if isinstance(answer, AuditReport):
        fits = [(f"update {update.number}", update.window.fit) for update in answer.updates]
        weights = [(heading, weights_chart(fit.used, fit.weights)) for heading, fit in fits if fit and fit.weights]
        return replace(view, weights=weights, timeline=list(_timeline(answer.calls.timeline)))
    return replace(
        view,
        plot=Markup(profile_svg(answer)) if answer.rows else Markup(""),
        profile=[(*profile_cells(row), row.message) for row in answer.rows],
    )


def _largest(rows: Iterable[ParameterComparison]) -> float:
    sizes = [row.relative_difference for row in rows if row.outcome is Outcome.DIVERGENT]
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def _finding(finding: Finding, before: float) -> FindingView:
    summary, where = summary_and_place(finding)
    place = finding.location
    lines: list[tuple[int, str, bool]] = []
    if place is not None and place.excerpt is not None:
        numbered = enumerate(place.excerpt.lines, place.excerpt.first)
        lines = [(at, text.expandtabs(4), at == place.line) for at, text in numbered]
        where = where or f"{place.file}:{place.line}"
    chart = _before_and_after(finding, before)
    return FindingView(finding, kind_of(finding), summary, where, rows_of(finding), lines, chart)


def _before_and_after(finding: Finding, before: float) -> BarChart:
    """The difference as the user's code makes it, without the suspect in both runs, and with each repair that ran.

    All are differences of the whole gradient. `difference` stands in other evidence as well, where it is that of the
    values of the forward; `before` is the largest of a parameter, for want of the whole gradient's.
    """
    values = [evidence.values for evidence in finding.evidence]
    difference_left = next(
        (_number(v.get("left", v.get("residual"))) for v in values if "left" in v or "residual" in v), math.nan
    )
    harm = [_number(e.values.get("difference")) for e in finding.evidence if e.probe == "harm"]
    alone = [_number(v.get("alone")) for v in values if "left" in v]
    full_difference = next((size for size in (*harm, *alone) if size > 0), before)
    if math.isnan(difference_left) or not full_difference > 0:
        return BarChart()
    label = "as it is" if full_difference is before else "whole gradient, as it is"
    bars = [
        (label, full_difference, "divergent"),
        ("control run", difference_left, "equivalent" if finding.proven else "inconclusive"),
    ]
    for repair in next((v["repairs"] for v in values if "repairs" in v), ()):
        kind = "equivalent" if repair["rounding"] else "inconclusive"
        bars.append((f"repair: {clean(str(repair['what']))}", _number(repair["left"]), kind))
    return repairs_chart(bars)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _table(table: Table, culprits: set[str], show_all: bool) -> TableView:
    rows = [_cells(row, show_all) for row in sort_rows(table.rows)]
    modules = chart_by_parameters(table.rows, culprits)
    begins = next((bar.name for bar in modules.bars if bar.kind == Outcome.DIVERGENT.value), "")
    module_names = {name for name, _ in modules_of(table.rows)}
    elsewhere = sorted(clean(name) for name in culprits - module_names)
    starred = any(row.vanishing for row in table.rows)
    last = "worst element: full vs accumulated" if show_all else "remark"
    return TableView(table.heading, rows, parameters_chart(table.rows), modules, begins, elsewhere, starred, last)


def _cells(row: ParameterComparison, show_all: bool) -> tuple[str, ...]:
    return (
        row.name or "(unnamed)",
        *measures(row),
        number(row.working_difference_norm),
        row.outcome.value,
        str(row.method),
        (worst(row) if show_all else "") or row.reason,
    )


def _chart_fitted_weights(verdict: Verdict) -> Iterator[tuple[str, BarChart]]:
    fits = (evidence.values.get("weights") for finding in verdict.findings for evidence in finding.evidence)
    fitted = next((fit for fit in fits if isinstance(fit, (list, tuple)) and fit), None)
    if fitted is not None:
        yield "", weights_chart(verdict.run.weights, [_number(weight) for weight in fitted])


Call = tuple[str, str, str]  # the kind of a call, its class in the page, its place
Repeated = tuple[Sequence[Call], int]  # calls in their order, and how often they follow one another


def _timeline(moments: Sequence[Moment]) -> Iterator[tuple[str, list[Repeated]]]:
    """Yields (updates and rank, their calls in order), calls that repeat once with their count.

    Updates that follow one another with the same calls are one entry.
    """
    several = len({moment.rank for moment in moments}) > 1
    in_order = sorted(moments, key=lambda moment: (moment.update, moment.rank))  # stable: calls keep their order
    entries: list[tuple[int, int, int, list[Repeated]]] = []  # rank, first and last update, calls
    for (update, rank), group in groupby(in_order, key=lambda moment: (moment.update, moment.rank)):
        calls = collapse_repeats([_call(moment) for moment in group])
        # the latest entry of this rank: with several ranks those of the others stand between
        place = next((at for at in reversed(range(len(entries))) if entries[at][0] == rank), None)
        if place is not None and entries[place][3] == calls and entries[place][2] == update - 1:
            entries[place] = (rank, entries[place][1], update, calls)
        else:
            entries.append((rank, update, update, calls))
    for rank, first, last, calls in entries:
        updates = f"update {first}" if first == last else f"updates {first} to {last}"
        yield f"{updates}, rank {rank}" if several else updates, calls


def _call(moment: Moment) -> Call:
    place = f"{moment.file}:{moment.line}" if moment.file and moment.line else moment.file or ""
    return moment.kind, moment.kind.replace("_", "-"), place


_LONGEST_REPEAT = 12  # calls of one micro-batch that are recognised as a repeating group


def collapse_repeats(calls: Sequence[Call]) -> list[Repeated]:
    """Returns the calls with each group that repeats written once, with how often it follows itself."""
    collapsed: list[Repeated] = []
    at = 0
    while at < len(calls):
        best = (1, 1)  # length of the group, how often
        for length in range(1, min(_LONGEST_REPEAT, (len(calls) - at) // 2) + 1):
            group = calls[at : at + length]
            times = 1
            while calls[at + times * length : at + (times + 1) * length] == group:
                times += 1
            # the group that covers most calls; of equals the shortest
            if times > 1 and times * length > best[0] * best[1]:
                best = (length, times)
        length, times = best
        collapsed.append((tuple(calls[at : at + length]), times))
        at += length * times
    return collapsed
