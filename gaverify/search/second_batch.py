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

from gaverify.passes.gradients import PassProbe
from gaverify.passes.precision import move_weights
from gaverify.records.accumulation import AccumulationWindow
from gaverify.records.experiment import Cause, ControlRun, are_ones
from gaverify.records.facts import Facts
from gaverify.search import counts, operations, proof, state, weights
from gaverify.search.bench import Bench
from gaverify.thresholds import MOVED_SHARES
from gaverify.tracebacks import hands_over
from gaverify.verdict.sketches import fit_runs, keep_sketch

T = TypeVar("T")

_SEEDS = (1, 2, 3, 4, 5)  # of the rows and draws of the second batch, and of further ones
_FIXED = ("uniform", "samples", "none")  # weightings that are the same for every batch of these sizes
_TRIED = 3  # batches on which weights without a meaning have to be right


def ask(bench: Bench, facts: Facts) -> Facts:
    """Marks the repairs that leave something on a second batch; where none can be made, they stay as they are.

    With several causes nothing is marked: no single repair would leave nothing.
    """
    weight_facts, causes, state_facts = facts.window, facts.forward.causes, facts.state
    cause_count = len(causes) + weight_facts.has_wrong_weights + (state_facts is not None and bool(state_facts.blamed))
    if not facts.cleared or facts.draws.control is not None or cause_count != 1:
        return facts
    # The other samples of a larger batch are a second batch (`confirming`): only numbers without a meaning of their own
    # are tried on batches that are drawn anew.
    if bench.in_part and (weight_facts.remedy is None or _has_meaning(weight_facts)):
        return facts
    if weight_facts.remedy is not None:
        return _mark_weights(bench, facts)
    second = bench.possible(lambda: _make_second_batch(bench))
    if second is None:
        return facts
    if state_facts is not None and state_facts.blamed:
        runs = [
            _mark_run(run, second.possible(partial(state.run_control, second, run.kind)))
            for run in state_facts.remedies
        ]
        return replace(facts, state=replace(state_facts, remedies=tuple(runs)))
    return replace(facts, forward=replace(facts.forward, causes=tuple(_mark_cause(second, cause) for cause in causes)))


def _mark_weights(bench: Bench, facts: Facts) -> Facts:
    """Marks weights that are wrong on a second batch, and looks for the cause that they stand for."""
    # Such weights are a number of this window, and its rule is looked for first. Or the loss picks samples and happened
    # to pick alike in all micro-batches (a worst group): another batch then shows the operation that couples samples.
    weight_facts = facts.window
    has_meaning = _has_meaning(weight_facts)
    seeds = _SEEDS[: 1 if has_meaning else _TRIED]
    find_failure = partial(_find_failed_repair, weight_facts=weight_facts)
    failed = next(filter(None, (_ask_on_another_batch(bench, seed, find_failure) for seed in seeds)), None)
    if failed is None or weight_facts.remedy is None:
        return facts
    facts = replace(facts, window=replace(weight_facts, remedy=_mark_run(weight_facts.remedy, failed)))
    rule = facts if weight_facts.counts else counts.ask(bench, facts)
    if rule.window.counts and not weight_facts.counts:
        return _mark_weights(bench, rule)
    operation_causes = (
        _ask_on_another_batch(bench, seed, partial(_find_only_operation, facts=facts))
        for seed in _SEEDS
        if not has_meaning
    )
    cause = next(filter(None, operation_causes), None)
    return facts if cause is None else _replace_weights_by_cause(bench, facts, cause)


def _has_meaning(weight_facts: AccumulationWindow) -> bool:
    return (
        weight_facts.fit is not None and not weight_facts.counts and weights.has_meaning(weight_facts, weight_facts.fit)
    )


def _ask_on_another_batch(bench: Bench, seed: int, ask: Callable[[Bench], T]) -> T | None:
    """Asks on a second batch; from the second seed on with parameters far away, where a loss picks other samples."""
    parameters = list(bench.experiment.parameters.values())
    with move_weights(parameters, [MOVED_SHARES[-1]] * len(parameters), seed) if seed > _SEEDS[0] else nullcontext():
        moved_bench = replace(bench, experiment=bench.experiment.with_current_state())
        return bench.possible(lambda: ask(_make_second_batch(moved_bench, seed)))


def _find_failed_repair(second: Bench, weight_facts: AccumulationWindow) -> ControlRun | None:
    """The run of the repair on a second batch, if it leaves more than rounding."""
    run = _run_weights_repair(second, weight_facts)
    return run if run is not None and not run.rounding and math.isfinite(run.left) else None


def _replace_weights_by_cause(bench: Bench, facts: Facts, cause: Cause) -> Facts:
    """Replaces weights by a cause, if its control leaves nothing of this batch's difference either."""
    proven = bench.possible(partial(proof.rerun_cause, bench, cause))
    if proven is None or proven.control is None or not proven.control.rounding:
        return facts
    weight_facts = replace(facts.window, remedy=None, counts=(), place=None)
    forward = replace(facts.forward, causes=(proven,))
    return replace(facts, window=weight_facts, forward=forward, left=proven.control.left)


def _find_only_operation(second: Bench, facts: Facts) -> Cause | None:
    """The one operation that explains everything in another batch, where no weights do; None where there is none."""
    sketches, accumulated = second.sketch_micro_batches(second.experiment.full_batch())
    fit = fit_runs([sketches])
    difference_left = second.against_full_batch(lambda _: accumulated.gradients)
    second_bench = replace(second, total=difference_left)
    sizes = second.experiment.sizes
    weight_facts = AccumulationWindow(accumulated.weights, facts.window.weighting, sizes, len(sizes), fit=fit)
    facts = replace(facts, window=weight_facts, left=difference_left, cleared=False)
    if difference_left <= second_bench.rounding or not all(map(math.isfinite, accumulated.micro_losses)):
        return None
    if weights.choose_fit(second_bench, facts, fit) is not None:
        return None
    facts = operations.ask(second_bench, facts)
    is_only_cause = facts.cleared and not facts.window.has_wrong_weights and len(facts.forward.causes) == 1
    return facts.forward.causes[0] if is_only_cause else None


def _mark_run(run: ControlRun, second_run: ControlRun | None) -> ControlRun:
    return run if second_run is None else replace(run, holds=second_run.rounding)


def _make_second_batch(bench: Bench, seed: int = _SEEDS[0]) -> Bench:
    """The bench with another batch, and the draws that belong to it."""
    second = bench.experiment.with_seed(seed)
    second.progress("a second batch")
    if not second.draws.count:  # what draws nothing needs no run whose draws are recorded
        return replace(bench, experiment=second, reference=None, in_part=False)
    second, full = second.record(seed=seed)
    return replace(bench, experiment=second, reference=keep_sketch(second, full), in_part=False)


def _run_weights_repair(second: Bench, weight_facts: AccumulationWindow) -> ControlRun | None:
    """Accumulates with the weights that the repair in words gives the second batch."""
    if weight_facts.counts:
        reference = second.reference or keep_sketch(second.experiment, second.experiment.full_batch())
        second = replace(second, reference=reference)
        fixed = second.experiment.weighting in _FIXED and second.experiment.sizes == weight_facts.sizes
        plain = None if fixed else second.experiment.micro_batches(reference.full)
        window_counts = counts.find_counts(second, weight_facts.used if plain is None else plain.weights)
        if window_counts is not None:
            return window_counts.control
        plain = plain or second.experiment.micro_batches(reference.full)
        difference_left = second.against_full_batch(lambda _: plain.gradients)
        # rounding: nothing counts otherwise there; a micro-batch that holds nothing to count has no mean either
        is_conclusive = difference_left > second.rounding and all(map(math.isfinite, plain.micro_losses))
        return ControlRun("with these weights", difference_left, False) if is_conclusive else None
    assert weight_facts.fit is not None
    weighting = {"samples": "samples", "targets": "tokens"}.get(weight_facts.name_shares(weight_facts.fit.weights))
    if weighting is None and are_ones(weight_facts.fit.weights, weight_facts.fit.residual):
        weighting = "none"
    if weighting is not None:
        second = replace(second, experiment=replace(second.experiment, weighting=weighting))
        return second.run_repair("with these weights")
    factor = next(c / w for c, w in zip(weight_facts.fit.weights, weight_facts.used, strict=True) if w)
    return second.run_repair("with these weights", _Times(factor))


class _Times(PassProbe):
    """Multiplies every micro-batch's loss."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Runs the backward of the loss, times the factor in a micro-batch."""
        super().backward(k, loss, weight if k is None else weight * self._factor)


def _mark_cause(second: Bench, cause: Cause) -> Cause:
    """A cause with its control and its repairs marked."""
    second_cause = proof.rerun_cause(second, cause)
    if second_cause is None or second_cause.control is None or cause.control is None:
        return cause
    tried = {run.kind: run for run in second_cause.remedies}
    remedies = tuple(_mark_run(run, tried.get(run.kind)) for run in cause.remedies)
    return replace(cause, control=_mark_run(cause.control, second_cause.control), remedies=remedies)
