"""What the page shows of an answer, as plain values for the template; every text is escaped there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from markupsafe import Markup

from gaverify.records.audit_report import AuditReport, Moment
from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.findings import Finding
from gaverify.records.profile import LABELS, Profile
from gaverify.records.verdict import Verdict
from gaverify.report.junit import modules_of
from gaverify.report.page.charts import bars_chart, parameters_chart, weights_chart
from gaverify.report.page.modules import ModuleView, by_outputs, by_parameters, first_to_differ
from gaverify.report.plot import profile_svg
from gaverify.report.stories import Answer, Story, Table, story_of
from gaverify.report.text.findings import told
from gaverify.report.text.layout import clean
from gaverify.report.text.profile import moved_title
from gaverify.report.text.report import facts_of
from gaverify.report.text.wording import figures, moved_figures, number, ordered, shape, worst


@dataclass(frozen=True)
class FindingView:
    """A finding with its line in the source and what the control run left of the difference."""

    code: str
    name: str
    kind: str
    summary: str
    where: str
    accepted: str
    rows: Sequence[tuple[str, str]]
    remedy: str
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
    """One answer; `facts` are what was run, `timeline` the calls of a script by update and rank.

    `forward_of`: of how many samples the modules' outputs were, where they were those of a part of the batch.
    """

    title: str
    kind: str
    outcome: str
    said: str
    sentence: str
    method: str
    remarks: Sequence[str]
    facts: Sequence[tuple[str, str]]
    findings: Sequence[FindingView]
    tables: Sequence[TableView]
    command: str
    forward: Sequence[ModuleView] = ()
    forward_begins: str = ""
    forward_of: int = 0
    weights: Sequence[tuple[str, Markup]] = ()
    timeline: Sequence[tuple[str, Sequence[tuple[str, str, int, str]]]] = ()
    plot: Markup = field(default_factory=lambda: Markup(""))
    profile: Sequence[tuple[str, ...]] = ()
    moved: Sequence[tuple[str, ...]] = ()
    moved_title: str = ""


def view_of(answer: Answer) -> AnswerView:
    """Returns what the page shows of `answer`."""
    story = story_of(answer)
    before = max((_largest(table.rows) for table in story.tables), default=0.0)
    culprits = {finding.location.module for finding in story.findings if finding.location and finding.location.module}
    return AnswerView(
        title=clean(story.title),
        kind=story.kind,
        outcome=story.outcome.value,
        said=story.said,
        sentence=clean(story.sentence),
        method=clean(story.method),
        remarks=list(map(clean, story.remarks)),
        facts=[(label, clean(text)) for label, text in [*facts_of(answer), *_environment(answer)]],
        findings=[_finding(finding, before) for finding in story.findings],
        tables=[_table(table, culprits) for table in story.tables],
        command=clean(story.command),
        forward=list(by_outputs(answer.modules, culprits)) if isinstance(answer, Verdict) else (),
        forward_begins=first_to_differ(answer.modules) if isinstance(answer, Verdict) else "",
        forward_of=sum(answer.run.part) if isinstance(answer, Verdict) else 0,
        weights=list(_weights(answer, story)),
        timeline=list(_timeline(answer.timeline)) if isinstance(answer, AuditReport) else (),
        plot=Markup(profile_svg(answer)) if isinstance(answer, Profile) and answer.rows else Markup(""),
        profile=list(_profile(answer)) if isinstance(answer, Profile) else (),
        moved=list(_moved(answer)) if isinstance(answer, Profile) else (),
        moved_title=moved_title(answer) if isinstance(answer, Profile) else "",
    )


def _environment(answer: Answer) -> Iterator[tuple[str, str]]:
    made = answer.run if isinstance(answer, Verdict) else answer.setting if isinstance(answer, Profile) else answer
    if made is not None:
        yield "made by", f"gaverify {made.gaverify}, torch {made.torch}, Python {made.python}, {made.platform}"


def _largest(rows: Iterable[ParameterComparison]) -> float:
    sizes = [row.relative_difference for row in rows if row.outcome is Outcome.DIVERGENT]
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def _finding(finding: Finding, before: float) -> FindingView:
    summary, where = told(finding)
    kind = "note" if finding.severity == "note" else "proven" if finding.proven else "suspected"
    place = finding.location
    lines: list[tuple[int, str, bool]] = []
    if place is not None and place.excerpt is not None:
        numbered = enumerate(place.excerpt.lines, place.excerpt.first)
        lines = [(at, clean(text.expandtabs(4)), at == place.line) for at, text in numbered]
        where = where or f"{place.file}:{place.line}"
    return FindingView(
        finding.code,
        clean(finding.name),
        kind,
        clean(summary),
        clean(where),
        clean(finding.accepted),
        [(clean(evidence.label), clean(evidence.statement)) for evidence in finding.evidence],
        clean(finding.remedy),
        lines,
        _before_and_after(finding, before),
    )


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
    bars = [("as it is", own, "divergent"), ("control run", left, "equivalent" if finding.proven else "inconclusive")]
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
    sizes = (number(row.relative_difference), number(row.relative_allowed))
    if row.vanishing:
        sizes = (number(row.difference_norm) + "*", number(row.allowed) + "*")
    return (
        clean(row.name or "(unnamed)"),
        shape(row),
        number(row.reference_norm),
        *sizes,
        number(row.working_difference_norm),
        row.outcome.value,
        clean(str(row.method)),
        worst(row) or clean(row.reason),
    )


def _weights(answer: Answer, story: Story) -> Iterator[tuple[str, Markup]]:
    if isinstance(answer, AuditReport):
        for update in answer.updates:
            if update.fit is not None and update.fit.weights:
                yield f"update {update.number}", weights_chart(update.fit.used, update.fit.weights)
    elif isinstance(answer, Verdict):
        fits = (evidence.values.get("weights") for finding in story.findings for evidence in finding.evidence)
        fitted = next((fit for fit in fits if isinstance(fit, (list, tuple)) and fit), None)
        if fitted is not None:
            yield "", weights_chart(answer.run.weights, [_number(weight) for weight in fitted])


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
    return first.kind, first.kind.replace("_", "-"), len(run), clean(place)


def _moved(profile: Profile) -> Iterator[tuple[str, ...]]:
    for row in profile.rows:
        if row.moved is not None:
            yield (LABELS[row.strategy], str(row.steps), *moved_figures(row))


def _profile(profile: Profile) -> Iterator[tuple[str, ...]]:
    for row in profile.rows:
        yield (
            LABELS[row.strategy],
            str(row.steps),
            str(row.micro_batch or "-"),
            *figures(row),
            row.outcome.value if row.outcome else row.status,
            clean(row.message),
        )
