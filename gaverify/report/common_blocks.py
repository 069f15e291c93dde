"""The common parts of all pages: headline, findings, patch, accepted outcomes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gaverify.records.answers import Answer
from gaverify.records.findings import Finding
from gaverify.records.outcomes import Outcome, ParameterComparison
from gaverify.records.profile import Row
from gaverify.report.blocks import Chart, Facts, FindingBlock, Headline, Page, PatchBlock, Section
from gaverify.report.charts import repairs_chart
from gaverify.report.layout import clean, made_by


def finding_blocks(findings: Iterable[Finding], rows: Iterable[ParameterComparison]) -> tuple[FindingBlock, ...]:
    """Returns a block for each finding; `rows` are all compared parameters."""
    sizes = [row.relative_difference for row in rows if row.outcome is Outcome.DIVERGENT]
    largest = max((size for size in sizes if math.isfinite(size)), default=0.0)
    return tuple(_block(finding, largest) for finding in findings)


def blamed_modules(findings: Iterable[Finding]) -> frozenset[str]:
    """Returns the names of the modules that findings name."""
    return frozenset(finding.location.module for finding in findings if finding.location and finding.location.module)


def _block(finding: Finding, largest: float) -> FindingBlock:
    kind = "note" if finding.severity == "note" else "proven" if finding.proven else "suspected"
    rows = [(evidence.label, evidence.statement) for evidence in finding.evidence]
    rows += [("remedy", finding.remedy)] if finding.remedy else []
    return FindingBlock(finding, kind, *_summary_and_place(finding), tuple(rows), _before_and_after(finding, largest))


def _summary_and_place(finding: Finding) -> tuple[str, str]:
    """The summary with the place in front; where it names the module already, file and line are the second value."""
    place, text = finding.location, finding.summary
    if place is None or not str(place):
        return text, ""
    if place.module is not None and (f"`{place.module}`" if place.module else place.module_text) in text:
        if place.file is None:
            return text, ""
        return text, f"{place.file}:{place.line}" if place.line is not None else place.file
    if str(place) in text:
        return text, ""
    return (f"{place}: {text}" if text else str(place)), ""


def _before_and_after(finding: Finding, largest: float) -> Chart:
    """The difference as the user's code makes it, without the suspect in both runs, and with each repair that ran.

    All are differences of the whole gradient, or for want of one `largest`, the largest of a parameter.
    """
    values = [evidence.values for evidence in finding.evidence]
    # a control says what is left of the difference, a fit of weights what it does not explain
    difference_left = next(
        (_number(v.get("left", v.get("residual"))) for v in values if "left" in v or "residual" in v), math.nan
    )
    # in other evidence `difference` may be that of the forward's values
    harm = [_number(e.values.get("difference")) for e in finding.evidence if e.probe == "harm"]
    alone = [_number(v.get("alone")) for v in values if "left" in v]
    full_difference = next((size for size in (*harm, *alone) if size > 0), largest)
    if math.isnan(difference_left) or not full_difference > 0:
        return Chart()
    label = "as it is" if full_difference is largest else "whole gradient, as it is"
    bars = [
        (label, full_difference, "divergent"),
        # what was not proven is not shown as repaired
        ("control run", difference_left, "equivalent" if finding.proven else "inconclusive"),
    ]
    for repair in next((v["repairs"] for v in values if "repairs" in v), ()):
        kind = "equivalent" if repair["rounding"] else "inconclusive"
        # a user's class may have any name
        bars.append((f"repair: {clean(str(repair['what']))}", _number(repair["left"]), kind))
    return repairs_chart(bars)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _patch_block(answer: Answer) -> PatchBlock | None:
    """Returns the patch of an answer, or why there is none; None where nobody asked for one."""
    patch = answer.patch
    if patch is None:
        return PatchBlock((("no patch", answer.patch_refused),)) if answer.patch_refused else None
    agree = "both runs were made again with it, and agree in every compared update"
    rows = [
        ("patch", patch.title),
        ("repairs", ", ".join(patch.codes)),
        ("tried", agree if answer.kind == "audit" else "both gradients were computed again with it, and agree"),
        ("unsafe", patch.unsafe),
        ("written", answer.patch_written),
        ("not written", answer.patch_refused),
    ]
    return PatchBlock(tuple((label, text) for label, text in rows if text), patch.diff)


def make_page(
    answer: Answer,
    title: str,
    sentence: str,
    facts: Facts,
    sections: Iterable[Section],
    *,
    method: str = "",
    states: Sequence[str] = (),
    remarks: Sequence[str] = (),
    rows: Iterable[ParameterComparison] = (),
    file: str = "",
    model: str = "",
    profile_rows: tuple[Row, ...] = (),
) -> Page:
    """Returns the page of an answer, with all that the user's entries and expectation make of its outcome.

    Args:
        answer: The answer, whose findings, patch, versions and command the page shows.
        title: The name of the run.
        sentence: Why the outcome is what it is.
        facts: The facts about the run.
        sections: The numbers.
        method: How it was decided.
        states: More words about the answer, behind those about acceptance.
        remarks: More sentences about it, in front of those about acceptance.
        rows: All compared parameters.
        file: The file that says what was run.
        model: The model as the spec names it.
        profile_rows: The rows of a profile.
    """
    acceptance, command = answer.acceptance, "run" if answer.kind == "verdict" else answer.kind
    own_states = _states(answer)
    refused = (f"not accepted: {entry}" for entry in acceptance.refused)
    headline = Headline(
        title,
        answer.outcome,
        sentence,
        method,
        f"gaverify {answer.environment.gaverify}" + ("" if command == "run" else f" {command}"),
        (*own_states, *states),
        _word_stale(len(acceptance.stale)),
        (*remarks, *filter(None, own_states.values()), *acceptance.stale, *refused),
        answer.exit_code == 0,
    )
    return Page(
        command,
        headline,
        finding_blocks(answer.findings, rows),
        facts,
        tuple(sections),
        file,
        model,
        answer.command,
        answer.timings.get("total", 0.0),
        made_by(answer.environment),
        answer.environment.started,
        profile_rows,
        _patch_block(answer),
    )


def _states(answer: Answer) -> dict[str, str]:
    """Returns the words for accepted and expected outcomes, each with its sentence or ""."""
    expected = answer.acceptance.expected
    if answer.patch_written:
        return {"repaired": ""}
    states: dict[str, str] = {}
    if answer.accepted:
        states["accepted"] = "accepted: every cause of the divergence is one that is known and wanted"
    if expected is answer.outcome:
        states["as expected"] = f'as expected (`expect = "{expected.value}"`)'
    elif expected is not None:
        states[f"{expected.value} was expected"] = (
            f"not as expected: {expected.value} was expected, and the outcome is {answer.outcome.value}; "
            "change `expect` if that is right"
        )
    # Only where there are entries does anybody think that a divergence is accepted.
    elif answer.outcome is Outcome.DIVERGENT and not answer.accepted and _has_entries(answer):
        states["not accepted"] = ""
    return states


def _has_entries(answer: Answer) -> bool:
    acceptance = answer.acceptance
    return bool(acceptance.stale or acceptance.refused) or any(finding.accepted for finding in answer.findings)


def _word_stale(count: int) -> str:
    if count == 0:
        return ""
    return "1 accept entry no longer occurs" if count == 1 else f"{count} accept entries no longer occur"
