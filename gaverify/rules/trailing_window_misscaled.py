"""GAV605 trailing-window-misscaled: a short last window is divided by the configured K.

What it finds

An update at the end of an epoch that has r < K micro-batches and whose loss was divided by K all the same.

Why gradients diverge

The mean over the window is its sum divided by r. Divided by K it is r/K of that: the last update of every epoch is too
small.

Signature in the numbers

Whole windows agree; the short one is the full-batch gradient times r/K, one factor for all parameters.

Example

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (x, y) in enumerate(loader):
        window = min(K, len(loader) - i // K * K)
        (criterion(model(x), y) / window).backward()
        if (i + 1) % K == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Under Adam the size of a gradient hardly matters for a single step; with many windows per epoch its share is small.

References

Lightning-AI/pytorch-lightning#19987
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.records.windows import Window
from gaverify.rules.rule import Rule, measured
from gaverify.rules.scale import factor_in_loop
from gaverify.rules.wording import backward_place, counted, difference, passes

RULE = Rule("GAV605", "trailing-window-misscaled")
_ROUNDED = 5e-3  # losses are multiplied in the precision of the script, bfloat16 perhaps


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a short window differs by r/K."""
    loop = facts.loop
    if loop is None:
        return
    if not loop.updates:
        yield from _by_calls(facts, loop)
        return
    for update in loop.updates:
        found = short_by(loop, update)
        if found is None:
            continue
        short, whole = found
        factor = short / whole
        yield RULE.finding(
            f"update {update.number} sums {passes(short)} but divides by K = {whole}: "
            f"its gradient is {factor:.4g} of the full batch's",
            measured(
                "micro-batch-weights",
                f"{difference(update)}; one factor r/K = {short}/{whole} leaves "
                f"{update.fit.factor_residual if update.fit else math.nan:.0e} of the gradient over",
                factor=factor,
                update=update.number,
            ),
            counted(loop.complete[:8], "counts"),
            location=backward_place(facts, update.number),
            remedy=f"divide the losses of this window by {short}, the micro-batches that it has "
            f"(weights {1 / short:.4g} each)",
            proven=True,
        )
        return


def short_by(loop: Record, update: UpdateComparison) -> tuple[int, int] | None:
    """Returns r and K where an update's gradient is r/K of the full batch's and its window has r < K micro-batches."""
    factor = factor_in_loop(loop, update)
    whole = loop.steps or loop.usual(loop.window_of(update.number))
    short = update.backwards
    if factor is None or not 0 < short < whole:
        return None
    return (short, whole) if math.isclose(factor, short / whole, rel_tol=loop.tolerance) else None


def _by_calls(facts: Facts, loop: Record) -> Iterator[Finding]:
    """The same by what the losses are multiplied by: 1/K in whole windows, and 1/K still where there are fewer."""
    for window in loop.complete:
        whole, short = loop.steps or loop.usual(window), window.backwards
        alike = [other for other in loop.complete if other.optimizers == window.optimizers]
        weights = {weight for other in alike for weight in _weights(other)}
        if not 0 < short < whole or alike[0].backwards != whole or len(weights) != 1:
            continue
        weight = weights.pop()
        if weight is not None and math.isclose(weight * whole, 1.0, rel_tol=_ROUNDED):
            yield RULE.finding(
                f"update {window.number} sums {passes(short)} but divides by K = {whole}: "
                f"its losses count {short / whole:.4g} together",
                measured("events", f"every loss is multiplied by {weight:.4g} = 1/{whole}", weight=weight),
                counted(loop.complete[:8], "counts"),
                location=backward_place(facts, window.number),
                remedy=f"divide the losses of this window by {short}, the micro-batches that it has",
                proven=False,
            )
            return


def _weights(window: Window) -> list[float | None]:
    """What each loss of a window was multiplied by, rounded; None where it is not known."""
    known = [event.values.get("weight") for event in window.of("backward")]
    return [None if weight is None else float(f"{weight:.3g}") for weight in known]
