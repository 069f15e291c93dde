"""Do other micro-batch weights explain the difference, and are they more than a coincidence?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from gaverify.passes.gradients import PassResult
from gaverify.passes.precision import move_weights
from gaverify.passes.sketches import sketch
from gaverify.records.comparison import Comparison, Repeatability, State
from gaverify.records.experiment import ControlKind, ControlRun, WeightFit, are_ones, is_constant
from gaverify.records.windows import AccumulationWindow
from gaverify.search.bench import Bench, Intervention
from gaverify.search.counts import find_terms_beside_constants
from gaverify.search.neutral import RestoredGradients, find_live_statistics
from gaverify.search.trace.first_divergence import find_reweighted_operation, has_diverging_branch
from gaverify.search.trace.state import StateWatch
from gaverify.thresholds import FIT_FLOAT32, FIT_FLOAT64, MOVED_SHARES, NO_WEIGHT, SAME_IN_FLOAT32, SMALL_PART, TINY
from gaverify.verdict.sketches import SketchedPass, Sketches, fit_runs, keep_sketch


def ask(bench: Bench, comparison: Comparison) -> Comparison:
    """Fits the weights, measures whether a pass repeats and what state changes, and tries weights with a meaning."""
    watch = StateWatch(bench.experiment)
    fit_and_repeats = bench.attempt("micro-batch weights", lambda: _fit_and_repeat(bench, comparison, watch))
    comparison = replace(comparison, state=State(watch.changes()))
    # A forward that clears gradients loses those of the micro-batches before it: no fitted weights mean anything then.
    if watch.clears_gradients:
        return _restore_gradients(
            bench, replace(comparison, backward=replace(comparison.backward, clearing=watch.clearing))
        )
    if fit_and_repeats is None:
        return comparison
    sketches, repeatability = fit_and_repeats
    fit = _fit(bench, comparison, sketches)
    comparison = replace(comparison, repeatability=repeatability, window=replace(comparison.window, fit=fit))
    return (
        try_weights(bench, comparison, fit)
        if comparison.repeats_itself and is_meaningful(bench, comparison, fit)
        else comparison
    )


def _restore_gradients(bench: Bench, comparison: Comparison) -> Comparison:
    """Runs both strategies with the gradients put back that a forward clears."""
    what = "the gradients that the forward clears put back"
    keep = Intervention(what, ControlKind.GRADIENTS_KEPT, RestoredGradients)
    control = bench.attempt("gradients kept", lambda: bench.run(keep))
    if control is None:
        return comparison
    comparison = replace(comparison, backward=replace(comparison.backward, kept=control))
    return replace(comparison, left=control.left, cleared=control.rounding)


def ask_at_moved_parameters(bench: Bench, comparison: Comparison) -> Comparison:
    """Tries weights without a meaning that hold for moved parameters as well."""
    if comparison.weights_first:
        return comparison
    # Weights that fit with constant state too may be a factor that changes from forward to forward (a divisor that
    # is a moving average). It does not depend on the parameters, so that moving them would not expose it;
    # the next question runs with constant state.
    pinned_fit = (
        comparison.state.control.fit if comparison.state is not None and comparison.state.control is not None else None
    )
    if pinned_fit is not None and is_explanation(bench, comparison, pinned_fit):
        return comparison
    fit = comparison.window.fit
    if fit is not None and fit.vacuous:
        # Any gradient is a combination of these few numbers: those of moved parameters are more, and tell.
        fit = bench.attempt("weights at moved parameters", lambda: fit_jointly(bench)) or fit
        comparison = replace(comparison, window=replace(comparison.window, fit=fit))
    fit = _find_joint_fit(bench, comparison, fit)
    return try_weights(bench, comparison, fit) if fit is not None else comparison


def try_weights(bench: Bench, comparison: Comparison, fit: WeightFit) -> Comparison:
    """Runs the accumulation with fitted weights; where that is impossible, they stay suspected."""
    remedy = bench.attempt("weights", lambda: run_fitted_weights(bench, fit))
    # taken out of the failures, which are listed as questions without an answer: here the fit is one
    weights = replace(comparison.window, fit=fit, remedy=remedy, failure=bench.failures.pop("weights", ""))
    if remedy is None:
        return replace(comparison, window=weights)
    return replace(comparison, window=weights, left=remedy.left, cleared=remedy.rounding)


def ask_place(bench: Bench, comparison: Comparison) -> Comparison:
    """Finds the loss call or division that counts otherwise than the micro-batches are weighted."""
    weight_facts = comparison.window
    # beside operations that couple samples no result adds up, and weights that the user gave are at no line of the loss
    if (
        not weight_facts.has_wrong_weights
        or weight_facts.fit is None
        or not comparison.cleared
        or comparison.forward.causes
        or weight_facts.given_wrong
    ):
        return comparison
    fitted = weight_facts.fit.weights
    place = bench.attempt("line of the weights", lambda: find_reweighted_operation(bench, weight_facts.used, fitted))
    return replace(comparison, window=replace(weight_facts, place=place))


def run_fitted_weights(bench: Bench, fit: WeightFit) -> ControlRun:
    """Runs the accumulation with the fitted weights."""
    return bench.run(weigh(fit.weights))


def weigh(weighting: str | Sequence[float]) -> Intervention:
    """Other micro-batch weights, as a word or as numbers."""
    change = partial(replace, weighting=weighting)
    return Intervention("with these weights", ControlKind.WEIGHTS, change=change, in_reference=False)


def choose_fit(bench: Bench, comparison: Comparison, fit: WeightFit | None) -> WeightFit | None:
    """The fitted weights, where they explain everything and are more than a coincidence of these parameters."""
    return fit if is_meaningful(bench, comparison, fit) else _find_joint_fit(bench, comparison, fit)


def is_meaningful(bench: Bench, comparison: Comparison, fit: WeightFit | None) -> bool:
    """Whether weights explain what is left, have a meaning, and the losses do not contradict them."""
    if fit is None or not is_explanation(bench, comparison, fit) or not has_meaning(comparison.window, fit):
        return False
    return not is_contradicted_by_losses(bench, comparison.window.used, fit)


def has_meaning(weights: AccumulationWindow, fit: WeightFit) -> bool:
    """Whether fitted weights are shares of samples or valid targets, all 1, or one factor of those that are used."""
    factor = [c / w for c, w in zip(fit.weights, weights.used, strict=True) if w]
    is_share = bool(weights.name_shares(fit.weights))
    return is_share or are_ones(fit.weights, fit.residual) or is_constant(factor, fit.residual)


def is_explanation(bench: Bench, comparison: Comparison, fit: WeightFit) -> bool:
    """Whether weights leave nothing of the difference, in the bench's precision."""
    most = FIT_FLOAT64 if bench.experiment.is_float64 else FIT_FLOAT32
    return fit.residual < (bench.floor or min(most, SMALL_PART * comparison.compared.total))


def _find_joint_fit(bench: Bench, comparison: Comparison, fit: WeightFit | None) -> WeightFit | None:
    """The weights that hold for moved parameters too; None where there are none."""
    if fit is None or fit.vacuous or not is_explanation(bench, comparison, fit):
        return None
    # A weight of zero is no share: the loss picks some samples and drops the others (a maximum, a worst group).
    if fit.determined and min(map(abs, fit.weights)) < NO_WEIGHT * max(map(abs, fit.weights)):
        return None
    if is_contradicted_by_losses(bench, comparison.window.used, fit):
        return None
    joint = bench.attempt("weights at moved parameters", lambda: fit_jointly(bench))
    if joint is None or not is_explanation(bench, comparison, joint):
        return None
    # Where a branch falls differently for a micro-batch, one factor per micro-batch explains everything, but only until
    # the branch falls differently again.
    takes_other_branch = bench.attempt("weights at moved parameters", lambda: has_diverging_branch(bench))
    return None if takes_other_branch else joint


def is_contradicted_by_losses(bench: Bench, used: Sequence[float], fit: WeightFit) -> bool:
    """Whether the losses add up to the full batch's with the weights that are used, and not with the fitted ones."""
    # A wrong weight is wrong in the loss and in the gradient. Where the loss is right and only the gradient fits other
    # weights, the backward depends on the batch. Weights that are not determined are one choice of many.
    losses = bench.possible(lambda: _read_losses(bench)) if fit.determined else None
    if losses is None:
        return False
    terms = [losses]
    if not is_weighted_sum(terms, used):  # a constant of the batch in the loss makes both sums wrong
        terms = bench.possible(lambda: find_terms_beside_constants(bench)) or []
    return bool(terms) and is_weighted_sum(terms, used) and not is_weighted_sum(terms, fit.weights)


def is_weighted_sum(terms: Sequence[tuple[float, Sequence[float]]], weights: Sequence[float]) -> bool:
    """Whether weighted values of the micro-batches add up to the full batch's: losses, or each of their terms."""

    def misses(full: float, values: Sequence[float]) -> bool:
        scale = max(abs(full), *map(abs, values))
        return abs(sum(w * value for w, value in zip(weights, values, strict=True)) - full) > SAME_IN_FLOAT32 * scale

    return not any(misses(full, values) for full, values in terms)


def _read_losses(bench: Bench) -> tuple[float, Sequence[float]]:
    """The loss of the full batch, and those of the micro-batches before their weights."""
    reference = bench.reference
    # what is neutralised on this bench was not in the earlier pass
    if reference is not None and reference.losses and not bench.experiment.probes:
        return reference.full.loss, reference.losses
    experiment, dealing = bench.experiment, bench.experiment.deal()
    full, *losses = (float(experiment.forward(k, dealing=dealing).detach()) for k in (None, *range(experiment.steps)))
    return full, losses


def fit_jointly(bench: Bench) -> WeightFit:
    """Fits the weights at the model's parameters and at moved ones together.

    Weights that belong to the data (counts, class weights, masks) explain both; factors that come out of the model
    itself, such as 1/√L_k of a root mean squared error, change with its parameters.
    """
    reference = bench.reference if not bench.experiment.probes else None
    sketches_before = reference.shares if reference is not None else None
    runs = [sketches_before] if sketches_before is not None else []
    weights = list(bench.experiment.parameters.values())
    for share in MOVED_SHARES if sketches_before is None else MOVED_SHARES[1:]:
        with move_weights(weights, [share] * len(weights)) if share else nullcontext():
            moved_bench = replace(bench, experiment=bench.experiment.with_current_state())
            sketches = moved_bench.sketch_micro_batches(moved_bench.experiment.full_batch())[0]
            # far from the user's parameters a loss may overflow: no weights would fit NaN, whatever they are
            if bool(sketches.full.isfinite().all()) and bool(sketches.columns.isfinite().all()):
                runs.append(sketches)
    return fit_runs(runs)


def _fit(bench: Bench, comparison: Comparison, sketches: Sketches) -> WeightFit:
    """The weights that fit best; shares of samples or targets where these leave nothing and the fit is not unique."""
    fit = fit_runs([sketches])
    for shares in () if fit.determined else comparison.window.shares:
        residual = sketches.left_by(torch.tensor(shares, dtype=sketches.columns.dtype, device=sketches.columns.device))
        # They were not fitted: where they leave nothing, that is no coincidence of a model with few parameters.
        share_fit = replace(fit, weights=shares, residual=residual, vacuous=False)
        if is_explanation(bench, comparison, share_fit):
            return share_fit
    return fit


def _fit_and_repeat(bench: Bench, comparison: Comparison, watch: StateWatch) -> tuple[Sketches, Repeatability | None]:
    """Sketches the micro-batches, and measures whether a pass repeats: the first micro-batch's, else the full batch's.

    None: that is not measured yet (`measure_repeatability`).
    """
    reference = bench.reference or keep_sketch(bench.experiment, bench.experiment.full_batch(watch))
    if reference.shares is not None and isinstance(reference.watch, StateWatch):
        fit = _fit(bench, comparison, reference.shares)
        # Micro-batches that add up to the full batch's gradient are a repetition of it: no other run is needed.
        meaningful = is_meaningful(bench, comparison, fit)
        if not meaningful and bench.experiment.limit.seconds is None and find_live_statistics(bench.experiment):
            # Their control is likely to show it, without another pass. A search that may end before that asks now.
            watch.absorb(reference.watch)
            return reference.shares, None
        exactly = meaningful and fit.residual <= comparison.repeats
        repeatability = Repeatability(fit.residual, fit.residual) if exactly else _repeat_first(bench, reference)
        if max(repeatability.forward, repeatability.backward) <= comparison.repeats:
            watch.absorb(reference.watch)
            return reference.shares, repeatability
    # A micro-batch that does not repeat itself may be one that cannot be run again: only the full batch decides.
    full = bench.experiment.full_batch(watch)
    if isinstance(reference.watch, StateWatch):
        watch.absorb(reference.watch)
    second_sketch = sketch(full.gradients.values(), bench.experiment.ranks)
    repeatability = _compare_passes(full, second_sketch, reference)
    shares = reference.shares or bench.sketch_micro_batches(full, watch, target=second_sketch)[0]
    return shares, repeatability


def measure_repeatability(bench: Bench, comparison: Comparison) -> Repeatability:
    """Measures how much two runs of the first micro-batch differ, else of the full batch, where that was put off."""
    assert bench.reference is not None
    repeatability = _repeat_first(bench, bench.reference)
    if max(repeatability.forward, repeatability.backward) <= comparison.repeats:
        return repeatability
    full = bench.experiment.full_batch()
    return _compare_passes(full, sketch(full.gradients.values(), bench.experiment.ranks), bench.reference)


def _compare_passes(full: PassResult, second_sketch: torch.Tensor, reference: SketchedPass) -> Repeatability:
    return Repeatability(
        _loss_difference(full.loss, reference.full.loss), _sketch_difference(second_sketch, reference.gradient)
    )


def _repeat_first(bench: Bench, reference: SketchedPass) -> Repeatability:
    """How much two runs of the first micro-batch differ; infinite where it cannot run again, or has no gradient."""
    assert reference.shares is not None
    experiment = replace(bench.experiment, sizes=bench.experiment.sizes[:1], weighting=[1.0], strategy="accumulate")
    second_pass = bench.possible(lambda: experiment.micro_batches(reference.full))
    before = reference.shares.columns[:, 0]
    if second_pass is None or not before.any():
        return Repeatability(math.inf, math.inf)
    second_sketch = sketch(second_pass.gradients.values(), bench.experiment.ranks)
    return Repeatability(
        _loss_difference(second_pass.micro_losses[0], reference.losses[0]), _sketch_difference(second_sketch, before)
    )


def _loss_difference(loss: float, before: float) -> float:
    return abs(loss - before) / max(abs(before), TINY)


def _sketch_difference(second_sketch: torch.Tensor, before: torch.Tensor) -> float:
    return float(
        torch.linalg.vector_norm(second_sketch.to(before.device) - before) / (torch.linalg.vector_norm(before) or 1.0)
    )
