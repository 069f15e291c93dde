"""Runs what would be printed as a repair on a second batch: rows drawn again, another seed.

A repair is a rule that holds for every window. What gives the full batch's gradient on one batch and not on the next
(the factor of a moving average, a number that this batch's samples add up to) is a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from gaverify.causes import counts, operations, proof, state, weights
from gaverify.causes.bench import Bench
from gaverify.passes.batching import drawn, micro_batch_sizes
from gaverify.passes.gradients import PassProbe, full_batch_gradients
from gaverify.passes.isolation import ModelState, generator_states, seed_torch
from gaverify.passes.precision import moved
from gaverify.passes.task import micro_batch_of
from gaverify.records.experiment import Cause, ControlRun, are_ones, are_shares
from gaverify.records.facts import Facts, Weights
from gaverify.thresholds import MOVED_SHARES
from gaverify.tracebacks import hands_over
from gaverify.verdict.sketches import fitted, kept

T = TypeVar("T")

_SEEDS = (1, 2, 3, 4, 5)  # of the second batch's rows and draws, and of those behind it
_FIXED = ("uniform", "samples", "none")  # weightings that are the same for every batch of these sizes
_TRIED = 3  # batches on which weights without a meaning of their own have to hold


def ask(bench: Bench, facts: Facts, *, in_part: bool = False) -> Facts:
    """Marks the repairs that leave something on a second batch; where none can be made, they stay as they are.

    Of several causes none is repaired alone: their repairs are tried together (`operations`).

    Args:
        bench: Where to run.
        facts: What the search showed.
        in_part: Whether the bench's batch is the first samples of a larger one. What is found there is confirmed on
            all of that (`confirming`), whose other samples are a second batch: only numbers that have no meaning of
            their own are tried on batches that are drawn anew.
    """
    known, causes, moving = facts.weights, facts.forward.causes, facts.state
    found = len(causes) + known.blamed + (moving is not None and bool(moving.blamed))
    if not facts.cleared or facts.draws.control is not None or found != 1:
        return facts
    if in_part and (known.remedy is None or _have_meaning(known)):
        return facts
    if known.remedy is not None:
        return _of_weights(bench, facts)
    second = bench.possible(lambda: _second(bench))
    if second is None:
        return facts
    if moving is not None and moving.blamed:
        runs = [_marked(run, second.possible(partial(state.run_control, second, run.kind))) for run in moving.remedies]
        return replace(facts, state=replace(moving, remedies=tuple(runs)))
    return replace(facts, forward=replace(facts.forward, causes=tuple(_of(second, cause) for cause in causes)))


def _of_weights(bench: Bench, facts: Facts) -> Facts:
    """Marks weights that do not hold on a second batch.

    They stand for a number of the window, whose rule is looked for; or the loss picks samples, and picked the same in
    every micro-batch by chance (a worst group): then another batch shows what couples them.
    """
    known = facts.weights
    meant = _have_meaning(known)
    seeds = _SEEDS[: 1 if meant else _TRIED]
    failed = next(filter(None, (_on_another(bench, seed, partial(_failed, known=known)) for seed in seeds)), None)
    if failed is None or known.remedy is None:
        return facts
    facts = replace(facts, weights=replace(known, remedy=_marked(known.remedy, failed)))
    rule = facts if known.counts else counts.ask(bench, facts)
    if rule.weights.counts and not known.counts:
        return _of_weights(bench, rule)
    shown = (_on_another(bench, seed, partial(_shown, facts=facts)) for seed in _SEEDS if not meant)
    cause = next(filter(None, shown), None)
    return facts if cause is None else _proven_instead(bench, facts, cause)


def _have_meaning(known: Weights) -> bool:
    return known.fit is not None and not known.counts and weights.have_meaning(known, known.fit)


def _on_another(bench: Bench, seed: int, ask: Callable[[Bench], T]) -> T | None:
    """Asks on a second batch; from the second seed on at weights far from these, where a loss picks other samples."""
    parameters = list(bench.task.parameters.values())
    with moved(parameters, [MOVED_SHARES[-1]] * len(parameters), seed) if seed > _SEEDS[0] else nullcontext():
        there = replace(bench, state=ModelState(bench.task.modules, (bench.task.problem.loss,)))
        return bench.possible(lambda: ask(_second(there, seed)))


def _failed(second: Bench, known: Weights) -> ControlRun | None:
    """What the repair leaves on a second batch, where that is more than rounding."""
    run = _weighed(second, known)
    return run if run is not None and not run.rounding and math.isfinite(run.left) else None


def _proven_instead(bench: Bench, facts: Facts, cause: Cause) -> Facts:
    """Names a cause in the place of weights, where its control leaves nothing of this batch's difference either."""
    proven = bench.possible(partial(proof.again, bench, cause))
    if proven is None or proven.control is None or not proven.control.rounding:
        return facts
    known = replace(facts.weights, remedy=None, counts=(), place=None)
    forward = replace(facts.forward, causes=(proven,))
    return replace(facts, weights=known, forward=forward, left=proven.control.left)


def _shown(second: Bench, facts: Facts) -> Cause | None:
    """The one operation that explains everything in another batch, where no weights do; None where there is none."""
    sketches, accumulated = second.sketched(second.full_batch())
    fit = fitted([sketches])
    left = second.against_full_batch(lambda _: accumulated.gradients)
    there, known = replace(second, total=left), Weights(accumulated.weights, facts.weights.weighting, second.task.sizes)
    facts = replace(facts, weights=replace(known, fit=fit), left=left, cleared=False)
    if left <= there.rounding or not all(map(math.isfinite, accumulated.micro_losses)):
        return None
    if weights.weighed(there, facts, fit) is not None:
        return None
    facts = operations.ask(there, facts)
    alone = facts.cleared and not facts.weights.blamed and len(facts.forward.causes) == 1
    return facts.forward.causes[0] if alone else None


def _marked(run: ControlRun, again: ControlRun | None) -> ControlRun:
    return run if again is None else replace(run, holds=again.rounding)


def _second(bench: Bench, seed: int = _SEEDS[0]) -> Bench:
    """The bench with another batch: of one that only the user's split can cut, the samples behind its first part."""
    task, problem = bench.task, bench.task.problem
    if problem.split is None:
        problem = replace(problem, batch=drawn(problem.batch, task.batch_size, seed))
    else:
        size = task.batch_size - task.sizes[0]
        batch = micro_batch_of(task, task.sizes[0], task.batch_size, "a second batch")
        problem = replace(problem, batch=batch, batch_size=size)
        task = replace(task, batch_size=size, sizes=micro_batch_sizes(size, task.steps))
    task = replace(task, problem=problem)
    task.progress("a second batch")
    if not bench.record.count:  # what draws nothing needs no run whose draws are recorded
        return replace(bench, task=task, earlier=None)
    restore = generator_states()
    seed_torch(seed)
    try:
        full, record = full_batch_gradients(task, bench.state, lift=bench.lift)
    finally:
        restore()
    return replace(bench, task=task, record=record, earlier=kept(full))


def _weighed(second: Bench, known: Weights) -> ControlRun | None:
    """Accumulates with the weights that the repair in words gives the second batch."""
    if known.counts:
        earlier = second.earlier or kept(second.full_batch())
        second = replace(second, earlier=earlier)
        fixed = second.task.weighting in _FIXED and second.task.sizes == known.sizes
        plain = None if fixed else second.accumulated(earlier.full)
        found = counts.found_in(second, known.used if plain is None else plain.weights)
        if found is not None:
            return found.control
        plain = plain or second.accumulated(earlier.full)
        left = second.against_full_batch(lambda _: plain.gradients)
        # rounding: nothing counts otherwise there; a micro-batch that holds nothing to count has no mean either
        told = left > second.rounding and all(map(math.isfinite, plain.micro_losses))
        return ControlRun("with these weights", left, False) if told else None
    assert known.fit is not None
    words = {"samples": tuple(map(float, known.sizes)), "tokens": known.valid_targets}
    weighting = next((word for word, shares in words.items() if are_shares(known.fit.weights, shares)), None)
    if weighting is None and are_ones(known.fit.weights, known.fit.residual):
        weighting = "none"
    if weighting is not None:
        there, probe = replace(second, task=replace(second.task, weighting=weighting)), None
    else:
        there, probe = second, _Times(next(c / w for c, w in zip(known.fit.weights, known.used, strict=True) if w))
    return there.repaired("with these weights", probe)


class _Times(PassProbe):
    """Multiplies every micro-batch's loss."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Runs the backward of the loss, times the factor in a micro-batch."""
        super().backward(k, loss, weight if k is None else weight * self._factor)


def _of(second: Bench, cause: Cause) -> Cause:
    """A cause with its control and its repairs marked."""
    again = proof.again(second, cause)
    if again is None or again.control is None or cause.control is None:
        return cause
    tried = {run.kind: run for run in again.remedies}
    remedies = tuple(_marked(run, tried.get(run.kind)) for run in cause.remedies)
    return replace(cause, control=_marked(cause.control, again.control), remedies=remedies)
