"""Runs what would be printed as a repair on a second batch: rows drawn again, another seed.

A repair is a rule that holds for every window. What gives the full batch's gradient on one batch and not on the next
(the factor of a moving average, a number that this batch's samples add up to) is a measurement.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from gaverify.causes import counts, proof, state
from gaverify.causes.bench import Bench
from gaverify.causes.sketches import kept
from gaverify.passes.batching import drawn, micro_batch_sizes
from gaverify.passes.gradients import PassProbe, full_batch_gradients
from gaverify.passes.isolation import generator_states, seed_torch
from gaverify.passes.task import micro_batch_of
from gaverify.records.experiment import Cause, ControlRun
from gaverify.records.facts import Facts, Weights
from gaverify.records.weights import are_shares
from gaverify.tracebacks import hands_over

_SEED = 1  # of the second batch's rows and draws


def ask(bench: Bench, facts: Facts) -> Facts:
    """Marks the repairs that leave something on a second batch; where none can be made, they stay as they are.

    Weights that do not hold there stand for a number of the window: its rule is looked for. Of several causes none is
    repaired alone: their repairs are tried together (`operations`).
    """
    known, causes, moved = facts.weights, facts.forward.causes, facts.state
    found = len(causes) + known.blamed + (moved is not None and bool(moved.blamed))
    if not facts.cleared or facts.draws.control is not None or found != 1:
        return facts
    second = bench.possible(lambda: _second(bench))
    if second is None:
        return facts
    if known.remedy is not None:
        remedy = _marked(known.remedy, second.possible(lambda: _weighed(second, known)))
        facts = replace(facts, weights=replace(known, remedy=remedy))
        rule = counts.ask(bench, facts) if not remedy.holds and not known.counts else facts
        return ask(bench, rule) if rule.weights.counts and not known.counts else facts
    if moved is not None and moved.blamed:
        runs = [_marked(run, second.possible(partial(state.run_control, second, run.kind))) for run in moved.remedies]
        return replace(facts, state=replace(moved, remedies=tuple(runs)))
    return replace(facts, forward=replace(facts.forward, causes=tuple(_of(second, cause) for cause in causes)))


def _marked(run: ControlRun, again: ControlRun | None) -> ControlRun:
    return run if again is None else replace(run, holds=again.rounding)


def _second(bench: Bench) -> Bench:
    """The bench with another batch: of one that only the user's split can cut, the samples behind its first part."""
    task, problem = bench.task, bench.task.problem
    if problem.split is None:
        problem = replace(problem, batch=drawn(problem.batch, task.batch_size, _SEED))
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
    seed_torch(_SEED)
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
        found = counts.found_in(second, second.accumulated(earlier.full).weights)
        return found.control if found is not None else None
    assert known.fit is not None
    words = {"samples": tuple(map(float, known.sizes)), "tokens": known.valid_targets}
    weighting = next((word for word, shares in words.items() if are_shares(known.fit.weights, shares)), None)
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
