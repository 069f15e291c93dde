"""Gradients that lost bits, are missing or are no numbers: GAV501 to GAV503."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.audit import Record
from gaverify.records.comparison import NotCompared, ParameterComparison
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding, Location
from gaverify.rules.rule import finding_of, measured, rule
from gaverify.rules.wording import count
from gaverify.rules.wrong_shares import empty_micro_batches
from gaverify.thresholds import BITS_WORTH_A_NOTE


@rule("GAV501")
def low_precision_accumulation(facts: Facts) -> Iterator[Finding]:
    """Yields a note where the accumulated gradient has fewer correct bits than the full-batch one."""
    loss = facts.compared.precision
    if loss is None or loss.bits_lost < BITS_WORTH_A_NOTE:
        return
    better = ""
    if loss.in_float32 is not None and loss.in_float32 < loss.accumulated:
        better = f": tested, the error is {loss.in_float32:.1e} instead of {loss.accumulated:.1e}"
    yield finding_of(
        f"accumulating in {loss.dtype} loses {loss.bits_lost:.1f} bits of the gradient",
        measured(
            "precision",
            f"error against float64: accumulated {loss.accumulated:.1e}, full batch {loss.full:.1e}"
            + (f" (that of {loss.samples} samples, and what adding up lost)" if loss.samples else ""),
            full=loss.full,
            accumulated=loss.accumulated,
            bits_lost=loss.bits_lost,
        ),
        severity="note",
        remedy=f"accumulate the gradients in float32{better}",
        proven=loss.samples == 0,
    )


@rule("GAV502")
def missing_gradient(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a parameter has a gradient on one side only."""
    rows = [row for row in facts.compared.divergent if row.why is not None and row.why.missing]
    if not rows or (facts.ranks is not None and facts.ranks.stepped_without):
        return
    names, values = f"`{rows[0].name}`", {"parameters": [row.name for row in rows]}
    have = "has" if len(rows) == 1 else "have"
    names += f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    if facts.loop is not None and _other_optimizers(facts.loop, facts.compared.update):
        yield finding_of(
            f"not the same optimizers step in update {facts.compared.update} of both runs",
            measured("events", f"{names} is stepped in one run only", **values),
            remedy="step all optimizers at the same place, at the end of the window",
            proven=True,
        )
        return
    update = "" if facts.loop is None else f" (update {facts.compared.update})"
    yield finding_of(
        f"{names} {have} {rows[0].reason}{update}",
        measured("comparison", f"{count(len(rows), 'parameter')} on one side only", **values),
        location=Location(rows[0].name.rpartition(".")[0]),
        remedy="look for a branch that depends on the batch: the parameter is reached on one side only",
        proven=True,
    )


def _other_optimizers(loop: Record, number: int | None) -> bool:
    whole = next((window for window in loop.full_windows if window.number == number), None)
    window = loop.window_of(number) if number is not None else None
    return whole is not None and window is not None and set(whole.optimizers) != set(window.optimizers)


@rule("GAV503")
def non_finite_gradient(facts: Facts) -> Iterator[Finding]:
    """Yields a fault where one run's gradients alone are not finite, a note where both are.

    Nothing where an empty micro-batch is to blame.
    """
    if empty_micro_batches(facts) and facts.compared.divergent:
        return
    for update, compared in facts.comparisons:
        rows = [row for row in compared if row.why is not None and row.why.not_finite]
        if rows:
            yield _finding(rows, update)
            return


def _finding(rows: list[ParameterComparison], update: int | None) -> Finding:
    one_sided = [row for row in rows if row.why is not NotCompared.NOT_FINITE_IN_BOTH]
    shown = one_sided or rows
    where = f"`{shown[0].name}`" + (f" and {count(len(shown) - 1, 'more parameter')}" if len(shown) > 1 else "")
    return finding_of(
        f"the gradient of {where} is {shown[0].reason}" + (f" (update {update})" if update is not None else ""),
        measured("comparison", f"{count(len(rows), 'gradient')} not finite", parameters=[row.name for row in rows]),
        severity="fault" if one_sided else "note",
        location=Location(shown[0].name.rpartition(".")[0]),
        remedy="look for divisions by zero, logarithms of zero, means over nothing, and overflow in low precision",
        proven=True,
    )
