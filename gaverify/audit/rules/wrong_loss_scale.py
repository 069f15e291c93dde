"""GAV201 wrong-loss-scale: the accumulated gradient is a constant times the full batch's.

What it finds

One factor for all parameters and micro-batches between what the optimizer got in both runs: K where the division by K
was forgotten (or came after the backward), 1/K where the loss was divided twice.

Why gradients diverge

The full batch's loss is a mean over its samples; K micro-batch means sum to K times that.

Signature in the numbers

accumulated = c · full with a residual at rounding; c is K, 1/K, or a ratio of token counts.

Example

    for i, (x, y) in enumerate(loader):
        criterion(model(x), y).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Adam divides the gradient by its own size and hides the factor, until its epsilon, clipping or weight decay see it.

References

karpathy/nanoGPT#168, roboflow/rf-detr#1503, huggingface/transformers#47688, huggingface/trl PR#6024,
verl-project/verl PR#436
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.audit.records import Record, UpdateComparison, WeightFit
from gaverify.audit.rules.empty_micro_batch import explains
from gaverify.audit.rules.scale import constant_factor, factor_of
from gaverify.audit.rules.trailing_window_misscaled import short_by
from gaverify.audit.rules.wording import backward_place, difference, window_of
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV201", "wrong-loss-scale"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a finding where one factor explains the difference."""
    update = record.divergent
    if explains(record):
        return
    if update is not None:
        factor = factor_of(record, update)
        if factor is not None and update.fit is not None and short_by(record, update) is None:
            yield _finding(record, factor, update.fit, update.backwards, update)
    elif record.held is not None and record.held.residual < record.tolerance:
        factor = constant_factor(record.held, record.tolerance)
        if factor is not None:
            yield _finding(record, factor, record.held, len(record.held.right), None)


def _finding(record: Record, factor: float, fit: WeightFit, count: int, update: UpdateComparison | None) -> Finding:
    known = (
        (float(count), "K: the loss is not divided by K"),
        (1 / count, "1/K: the loss is divided by K although it needs no division, or twice"),
    )
    meaning = next((f" = {text}" for value, text in known if math.isclose(factor, value, rel_tol=record.tolerance)), "")
    number = update.number if update is not None else 1
    what = f"the gradient of update {number}" if update is not None else "the sum over the window's micro-batches"
    left = fit.factor_residual if fit.factor_residual < record.tolerance else fit.residual
    measured = f"{difference(update)}; " if update is not None else "with every step undone, "
    right = "" if count < 2 else f" (weights {1 / factor:.4g} each)"
    return Finding(
        CODE, NAME, "fault", f"{what} is {factor:.6g} times the full batch's{meaning}",
        location=backward_place(window_of(record, number)),
        evidence=(Evidence("micro-batch-weights", "measured",
                           f"{measured}one factor for all parameters leaves {left:.0e} of the gradient over",
                           {"factor": factor, "residual": left, "update": number}),),
        remedy=f"multiply each micro-batch's loss by {1 / factor:.6g}{right}", proven=True,
    )  # fmt: skip
