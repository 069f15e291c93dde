"""GAV201 wrong-loss-scale: the accumulated gradient is the full-batch gradient times one constant.

What it finds

One factor c for all parameters and micro-batches: accumulated = c · full, with nothing left over. A forgotten or
doubled division by K, a division by the wrong count, a loss scaled after `backward()`.

In a training loop: one factor for all parameters and micro-batches between what the optimizer got in both runs: K
where the division by K was forgotten (or came after the backward), 1/K where the loss was divided twice.

Why gradients diverge

`backward()` adds to `.grad`. For a loss that is a mean over the samples of its (micro-)batch, and K equal
micro-batches,

    full = (1/K) Σ_k g_k,     without the division: Σ_k g_k = K · full

so that every micro-batch's loss has to be multiplied by 1/K. For a loss that is a sum over samples, or that is
divided by the samples or valid targets of the whole window, the factor is 1, and a division by K makes the gradient
K times too small. Frameworks often divide already (`accelerator.backward`, Lightning, the Hugging Face Trainer):
dividing again is the other way to get 1/K.

Signature in the numbers

- The fitted micro-batch weights are the used ones divided by one constant; the residual is at rounding (2e-15).
- The constant is named where it is known: K, 1/K, B, 1/B, B/K, K/B.
- The relative difference is |c − 1| for every parameter: 3.0 where a division by K = 4 was forgotten.
- In a training loop: accumulated = c · full with a residual at rounding; c is K, 1/K, or a ratio of token counts.
- In a training loop whose loss is a sum: the same for one of its terms, from runs that differentiate each term alone. A
  penalty on the weights that is added in every micro-batch and not divided counts K times.

Example

A model:

    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    options = {"weighting": "none"}  # the loop calls loss.backward() as it is

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

A training loop:

    for i, (x, y) in enumerate(loader):
        criterion(model(x), y).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

`(loss / K).backward()` for a mean over samples; no division for a sum. `reduction` of the loss decides which.

A model:

    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    options = {"weighting": "uniform"}  # the loop calls (loss / K).backward()

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

A training loop:

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Adam and its relatives divide by the gradient's own size: a constant factor changes the update only through ε. It is
not harmless to clipping by norm (the threshold meets a gradient K times larger), to weight decay inside the
gradient, to SGD (the learning rate is c times what was set), and to anyone who compares runs with different K.

In a training loop: adam divides the gradient by its own size and hides the factor, until its epsilon, clipping or
weight decay see it.

References

- karpathy/nanoGPT#168, https://github.com/karpathy/nanoGPT/issues/168
- roboflow/rf-detr#1503 (divided twice), https://github.com/roboflow/rf-detr/issues/1503
- PyTorch, Automatic Mixed Precision examples, gradient accumulation,
  https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
- Hugging Face Accelerate, Performing gradient accumulation,
  https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.records.weights import LossTerm, WeightFit
from gaverify.rules.empty_micro_batch import explains_weights
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.scale import (
    constant_factor,
    counted_at,
    factor_in_loop,
    factor_of,
    factor_of_some,
    meaning_in_loop,
    told_steps,
    weights_of,
)
from gaverify.rules.trailing_window_misscaled import short_by
from gaverify.rules.wording import NOT_ENOUGH, backward_place, count, difference, exact, listed, not_run, tested
from gaverify.tracebacks import shown

RULE = Rule("GAV201", "wrong-loss-scale")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where one factor for all parameters and micro-batches makes the gradients agree."""
    if facts.loop is not None:
        yield from _in_loop(facts, facts.loop)
        return
    factor, left = factor_of(facts)
    if factor is None or abs(factor - 1) < max(1e-7, left):
        return
    right = exact([weight / factor for weight in facts.weights.used])
    yield RULE.finding(
        f"the accumulated gradient is {factor:.6g} times the full-batch gradient{_meaning(facts, factor)}",
        _measured(f"{facts.compared.largest}{counted_at(facts.weights)}; ", factor, left),
        *_control(facts, right),
        location=facts.weights.place.location if facts.weights.place is not None else None,
        remedy=_remedy(facts, factor, right),
        proven=_proven(facts),
    )


def _meaning(facts: Facts, factor: float) -> str:
    steps, size = facts.steps, facts.batch_size
    known = (
        (float(steps), "K: the loss was not divided by K"),
        (1.0 / steps, "1/K: the loss was divided by K although it needs no division, or twice"),
        (steps / size, "K/B"),
        (size / steps, "B/K"),
        (1.0 / size, "1/B"),
        (float(size), "B"),
    )
    return next((f" = {text}" for value, text in known if math.isclose(factor, value, rel_tol=1e-5)), "")


def _measured(before: str, factor: float, left: float, **values: int) -> Evidence:
    text = f"{before}one factor for all parameters leaves {left:.0e} of the gradient over"
    return measured("micro-batch-weights", text, factor=factor, residual=left, **values)


def _control(facts: Facts, right: str) -> tuple[Evidence, ...]:
    run = facts.weights.remedy
    if run is None:
        return not_run(facts) if facts.weights.failure else ()
    text = f"with weights {right} the difference is {run.left:.0e}: proven"
    if not run.rounding:
        text = f"with weights {right} a difference of {run.left:.0e} is left"
    return (controlled("micro-batch-weights", text, left=run.left),)


def _remedy(facts: Facts, factor: float, right: str) -> str:
    run = facts.weights.remedy
    if run is not None and not run.rounding and not facts.cleared:
        return NOT_ENOUGH
    text = f"multiply each micro-batch's loss by {exact([1 / factor])} (weights {right})"
    return text + (f": {tested(run)}" if run is not None and run.rounding else "")


def _proven(facts: Facts) -> bool:
    run = facts.weights.remedy
    return run.rounding if run is not None else not facts.weights.failure


def _in_loop(facts: Facts, loop: Record) -> Iterator[Finding]:
    """The same for the first differing update of a training loop, or for all its micro-batches with steps undone."""
    update = loop.divergent
    if explains_weights(facts):
        return
    if update is not None:
        factor = factor_in_loop(loop, update)
        if factor is not None and update.fit is not None and short_by(loop, update) is None:
            yield _of_update(facts, loop, factor, update.fit, update.backwards, update)
        elif factor is None and weights_of(loop) is None:
            found = list(_of_some(facts, loop, update))
            yield from found or _of_terms(loop, update)
    elif loop.steps_undone is not None and loop.steps_undone.residual < loop.tolerance:
        factor = constant_factor(loop.steps_undone, loop.tolerance)
        if factor is not None:
            yield _of_update(facts, loop, factor, loop.steps_undone, len(loop.steps_undone.weights), None)


def _of_terms(loop: Record, update: UpdateComparison) -> Iterator[Finding]:
    """The same for the terms of a loss that is a sum, each fitted for itself: a penalty that is not divided, say."""
    factors = {term: constant_factor(term.fit, loop.tolerance) for term in loop.terms}
    for term, factor in factors.items():
        if factor is None:
            continue
        meaning = meaning_in_loop(factor, update.backwards, 1, loop.tolerance).replace("the loss", "it")
        which = "" if term.samples else ", which is the same in every micro-batch,"
        alike = [other for other, own in factors.items() if own is None and _agrees(other, loop.tolerance)]
        others = f"; {count(len(alike), 'other term')} counted rightly" if alike else ""
        yield RULE.finding(
            f"term {term.number} of {term.count} of the loss{which} counts {factor:.6g} times as much in update "
            f"{update.number} as in the full batch{meaning}",
            measured(
                "comparison",
                f"{difference(update)}{others}",
                factor=factor,
                update=update.number,
                term=term.number,
                terms=term.count,
            ),
            controlled(
                "micro-batch-weights",
                f"with this term alone one factor leaves {term.fit.factor_residual:.0e} of the gradient over; the "
                "terms add up to the whole",
                residual=term.fit.factor_residual,
            ),
            location=Location(file=shown(term.file), line=term.line) if term.file is not None else None,
            remedy=f"multiply this term by {exact([1 / factor], loop.tolerance)} in each micro-batch, and leave the "
            "others as they are",
            proven=True,
        )


def _agrees(term: LossTerm, tolerance: float) -> bool:
    return term.fit.factor_residual <= tolerance and abs(term.fit.factor - 1) < tolerance


def _of_some(facts: Facts, loop: Record, update: UpdateComparison) -> Iterator[Finding]:
    """The same where it is some parameters alone that get a factor: what they feel is counted in every micro-batch."""
    found = factor_of_some(loop, update)
    if found is None:
        return
    factor, rows = found
    names, others = listed([f"`{row.name}`" for row in rows]), len(update.parameters) - len(rows)
    often = "in every micro-batch: divide it by K, or let its gradient flow in one of them"
    often = often if factor > 1 else "once in K micro-batches: do not divide it by K"
    what = f"{factor:.6g} = {'K' if factor > 1 else '1/K'} times the full batch's"
    yield RULE.finding(
        f"the gradient of {names} in update {update.number} is {what}; {count(others, 'other parameter')} agree"
        + ("s" if others == 1 else ""),
        measured(
            "comparison", difference(update), factor=factor, update=update.number, parameters=[row.name for row in rows]
        ),
        location=backward_place(facts, update.number),
        remedy=f"what only these parameters feel is counted {often}",
        proven=True,
    )


def _of_update(
    facts: Facts, loop: Record, factor: float, fit: WeightFit, count: int, update: UpdateComparison | None
) -> Finding:
    count = count or told_steps(loop, factor)
    meaning = meaning_in_loop(factor, count, facts.ranks.ranks if facts.ranks is not None else 1, loop.tolerance)
    number = update.number if update is not None else 1
    what = f"the gradient of update {number}" if update is not None else "the sum over the window's micro-batches"
    left = fit.factor_residual if fit.factor_residual < loop.tolerance else fit.residual
    before = f"{difference(update)}; " if update is not None else "with every step undone, "
    right = "" if count < 2 else f" (weights {exact([1 / factor], loop.tolerance)} each)"
    return RULE.finding(
        f"{what} is {factor:.6g} times the full batch's{meaning}",
        _measured(before, factor, left, update=number),
        location=backward_place(facts, number),
        remedy=f"multiply each micro-batch's loss by {exact([1 / factor], loop.tolerance)}{right}",
        proven=True,
    )
