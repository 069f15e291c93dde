"""Gradients that lost bits, are missing or are no numbers: GAV501 to GAV503."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.audit import Record
from gaverify.records.comparison import NotCompared, ParameterComparison
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding, Location
from gaverify.rules.rule import rule
from gaverify.rules.telling import told
from gaverify.rules.wording import count, listed
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
    of = f" (that of {loss.samples} samples, and what adding up lost)" if loss.samples else ""
    yield told("GAV501.bits", severity="note", proven=loss.samples == 0, loss=loss, of=of, better=better)


@rule("GAV502")
def missing_gradient(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a parameter has a gradient on one side only."""
    rows = [row for row in facts.compared.divergent if row.why is not None and row.why.missing]
    if not rows or (facts.ranks is not None and facts.ranks.stepped_without):
        return
    number, parameters = facts.compared.update, [row.name for row in rows]
    named = listed([f"`{name}`" for name in parameters], 1)
    if facts.loop is not None and _other_optimizers(facts.loop, number):
        yield told("GAV502.optimizers", proven=True, update=number, named=named, parameters=parameters)
        return
    yield told(
        "GAV502.one-side",
        location=Location(rows[0].name.rpartition(".")[0]),
        proven=True,
        together=[Location(name.rpartition(".")[0]) for name in parameters],
        named=named,
        have="has" if len(rows) == 1 else "have",
        reason=rows[0].reason,
        where="" if facts.loop is None else f" (update {number})",
        number=len(rows),
        parameters=parameters,
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
    return told(
        "GAV503.not-finite",
        severity="fault" if one_sided else "note",
        location=Location(shown[0].name.rpartition(".")[0]),
        proven=True,
        together=[Location(row.name.rpartition(".")[0]) for row in shown],
        named=f"`{shown[0].name}`" + (f" and {count(len(shown) - 1, 'more parameter')}" if len(shown) > 1 else ""),
        reason=shown[0].reason,
        where=f" (update {update})" if update is not None else "",
        number=len(rows),
        parameters=[row.name for row in rows],
    )
