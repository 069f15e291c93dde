"""Confirms a cause on the full batch, and repairs on a second batch.

In working precision first, where the difference has to fall to what correct models show; else in float64, whose control
of the full batch then decides. Without a confirmation the whole search runs on the full batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.passes.precision import move_weights
from gaverify.records.comparison import Comparison, State
from gaverify.records.experiment import Cause, ControlKind, ControlRun, WeightFit, are_ones, are_shares, is_constant
from gaverify.records.windows import AccumulationWindow
from gaverify.search import counts, operations, proof, state, weights
from gaverify.search.bench import FORESEEN, Bench, Intervention
from gaverify.thresholds import AGREE_FLOAT64, CORRECT_FLOAT32, GROUPINGS, MOVED_SHARES, SAME_IN_FLOAT32, TINY
from gaverify.tracebacks import hands_over
from gaverify.verdict.decision import Decision
from gaverify.verdict.measurement import Measurement
from gaverify.verdict.sketches import Sketches, fit_runs, keep_sketch

# Runs what would be printed as a repair on a second batch: rows drawn again, another seed.
#
# A repair is a rule that holds for every window. A change that gives the full batch's gradient on one batch only is a
# measurement: the factor of a moving average, a number that this batch's samples add up to.


T = TypeVar("T")

_SEEDS = (1, 2, 3, 4, 5)  # of the rows and draws of the second batch, and of further ones
_FIXED = ("uniform", "samples", "none")  # weightings that are the same for every batch of these sizes
_TRIED = 3  # batches on which weights without a meaning have to be right


def ask(bench: Bench, comparison: Comparison) -> Comparison:
    """Marks the repairs that leave something on a second batch; where none can be made, they stay as they are.

    With several causes nothing is marked: no single repair would leave nothing.
    """
    weight_facts, causes, state_facts = comparison.window, comparison.forward.causes, comparison.state
    cause_count = len(causes) + weight_facts.has_wrong_weights + (state_facts is not None and bool(state_facts.blamed))
    if not comparison.cleared or comparison.draws.control is not None or cause_count != 1:
        return comparison
    # The other samples of a larger batch are a second batch (`confirming`): only numbers without a meaning of their own
    # are tried on batches that are drawn anew.
    if bench.in_part and (weight_facts.remedy is None or _has_meaning(weight_facts)):
        return comparison
    if weight_facts.remedy is not None:
        return _mark_weights(bench, comparison)
    second, cause = bench.possible(lambda: _make_second_batch(bench)), next(iter(causes), None)
    if second is None:
        return comparison
    if state_facts is not None and state_facts.blamed:
        runs = [
            _mark_run(run, second.possible(partial(second.run, *run.interventions))) for run in state_facts.remedies
        ]
        return replace(comparison, state=replace(state_facts, remedies=tuple(runs)))
    if cause is None or cause.control is None:
        return comparison
    second_cause = second.possible(lambda: proof.rerun_cause(second, cause))
    if second_cause is None:
        return comparison
    second_runs = {run.kind: run for run in second_cause.remedies}
    remedies = tuple(_mark_run(run, second_runs.get(run.kind)) for run in cause.remedies)
    marked = replace(cause, control=_mark_run(cause.control, second_cause.control), remedies=remedies)
    return replace(comparison, forward=replace(comparison.forward, causes=(marked,)))


def _mark_weights(bench: Bench, comparison: Comparison) -> Comparison:
    """Marks weights that are wrong on a second batch, and looks for the cause that they stand for."""
    # Such weights are a number of this window, and its rule is looked for first. Or the loss picks samples and happened
    # to pick alike in all micro-batches (a worst group): another batch then shows the operation that couples samples.
    weight_facts = comparison.window
    has_meaning = _has_meaning(weight_facts)
    seeds = _SEEDS[: 1 if has_meaning else _TRIED]
    find_failure = partial(_find_failed_repair, weight_facts=weight_facts)
    failed = next(filter(None, (_ask_on_another_batch(bench, seed, find_failure) for seed in seeds)), None)
    if failed is None or weight_facts.remedy is None:
        return comparison
    comparison = replace(comparison, window=replace(weight_facts, remedy=_mark_run(weight_facts.remedy, failed)))
    rule = comparison if weight_facts.counts else counts.ask(bench, comparison)
    if rule.window.counts and not weight_facts.counts:
        return _mark_weights(bench, rule)
    operation_causes = (
        _ask_on_another_batch(bench, seed, partial(_find_only_operation, comparison=comparison))
        for seed in _SEEDS
        if not has_meaning
    )
    cause = next(filter(None, operation_causes), None)
    return comparison if cause is None else _replace_weights_by_cause(bench, comparison, cause)


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


def _replace_weights_by_cause(bench: Bench, comparison: Comparison, cause: Cause) -> Comparison:
    """Replaces weights by a cause, if its control leaves nothing of this batch's difference either."""
    proven = bench.possible(partial(proof.rerun_cause, bench, cause))
    if proven is None or proven.control is None or not proven.control.rounding:
        return comparison
    weight_facts = replace(comparison.window, remedy=None, counts=(), place=None)
    forward = replace(comparison.forward, causes=(proven,))
    return replace(comparison, window=weight_facts, forward=forward, left=proven.control.left)


def _find_only_operation(second: Bench, comparison: Comparison) -> Cause | None:
    """The one operation that explains everything in another batch, where no weights do; None where there is none."""
    sketches, accumulated = second.sketch_micro_batches(second.experiment.full_batch())
    # Before the fit, which has no answer where every target is masked: no gradient is a failed control.
    difference_left = second.against_full_batch(lambda _: accumulated.gradients)
    fit = fit_runs([sketches])
    second_bench = replace(second, total=difference_left)
    sizes = second.experiment.sizes
    weight_facts = AccumulationWindow(accumulated.weights, comparison.window.weighting, sizes, len(sizes), fit=fit)
    comparison = replace(comparison, window=weight_facts, left=difference_left, cleared=False)
    if difference_left <= second_bench.rounding or not all(map(math.isfinite, accumulated.micro_losses)):
        return None
    if weights.choose_fit(second_bench, comparison, fit) is not None:
        return None
    comparison = operations.ask(second_bench, comparison)
    is_only_cause = (
        comparison.cleared and not comparison.window.has_wrong_weights and len(comparison.forward.causes) == 1
    )
    return comparison.forward.causes[0] if is_only_cause else None


def _mark_run(run: ControlRun, second_run: ControlRun | None) -> ControlRun:
    return run if second_run is None else replace(run, holds=second_run.rounding)


def _make_second_batch(bench: Bench, seed: int = _SEEDS[0]) -> Bench:
    """The bench with another batch, and the draws that belong to it."""
    second = bench.experiment.with_seed(seed)
    second.progress("a second batch")
    if not second.draws.count:  # what draws nothing needs no run whose draws are recorded
        return replace(bench, experiment=second, reference=None, in_part=False)
    in_second_reading = second.reading.by_contents
    second, full = second.record(seed=seed)
    if in_second_reading:  # draws whose rows had to be found by their contents lie no better in another batch
        second = second.with_counts_of(second.micro_batches(full).draws).with_second_reading()
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
        return second.run(weights.weigh(weighting))
    factor = next(c / w for c, w in zip(weight_facts.fit.weights, weight_facts.used, strict=True) if w)
    times = Intervention("with these weights", ControlKind.WEIGHTS, partial(_Times, factor), in_reference=False)
    return second.run(times)


class _Times(PassProbe):
    """Multiplies every micro-batch's loss."""

    def __init__(self, factor: float, _: Experiment) -> None:
        self._factor = factor

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Runs the backward of the loss, times the factor in a micro-batch."""
        super().backward(k, loss, weight if k is None else weight * self._factor)


# Confirms on the full batch a cause that the first samples showed: its control and its repairs run once there.


_MANY = 1 << 14  # samples, from which on float32's sums over them leave more than that of correct models

_Confirm = Callable[[Bench, Comparison, Comparison], Comparison]


def confirm_in_working_precision(
    measurement: Measurement, decision: Decision, comparison: Comparison, part_comparison: Comparison
) -> Comparison | None:
    """Returns the comparison of the full batch with the cause that the first samples showed; None without confirmation.

    Args:
        measurement: The measurement of the whole batch.
        decision: By its part.
        comparison: Of the whole batch, in the precision of the user.
        part_comparison: The facts that the search found in the part.
    """
    if _choose_confirmation(part_comparison) is None or measurement.experiment.batch_size > _MANY:
        return None
    few, total = decision.few, comparison.compared.total
    floor = max(few.allowed, GROUPINGS * few.error + few.lost) if few is not None else 0.0
    # The questions take losses from the restored state, and these ran one after the other.
    has_state = part_comparison.state is not None and bool(state.read_changes(part_comparison.state.changes))
    losses = () if has_state else measurement.accumulated.micro_losses
    reference = measurement.sketch and replace(measurement.sketch, losses=losses)
    divergent = frozenset(row.name for row in comparison.compared.divergent)
    bench = Bench(measurement.experiment, reference=reference, total=total, floor=floor, divergent=divergent)
    return confirm_on_batch(bench, comparison, part_comparison)


def confirm_on_batch(bench: Bench, comparison: Comparison, part_comparison: Comparison) -> Comparison | None:
    """Returns the comparison of the batch with the cause that its first samples showed; None without confirmation.

    Args:
        bench: With the pass of the full batch that was made before.
        comparison: Of its batch.
        part_comparison: The facts that the search found in the part.
    """
    confirm = _choose_confirmation(part_comparison)
    if confirm is None:
        return None
    try:
        bench, comparison = _prepare_bench(bench, comparison, part_comparison)
        comparison = confirm(bench, comparison, part_comparison)
    except FORESEEN:
        return None
    return comparison if comparison.cleared and comparison.left <= _largest_rest(bench) else None


def _largest_rest(bench: Bench) -> float:
    """The relative difference that a control may leave on the whole batch."""
    return bench.floor or min(CORRECT_FLOAT32, bench.rounding)


def _choose_confirmation(part_comparison: Comparison) -> _Confirm | None:
    """How to confirm what explains everything in the first samples: one cause, or several classes of layers.

    None where there is nothing of that kind.
    """
    twice = part_comparison.repeatability
    still = twice is not None and max(twice.forward, twice.backward) < AGREE_FLOAT64
    if (
        not (part_comparison.cleared and still)
        or part_comparison.draws.control is not None
        or part_comparison.backward.kept is not None
    ):
        return None
    causes = part_comparison.forward.causes
    controls: list[tuple[ControlRun | None, _Confirm]] = [(cause.control, _confirm_causes) for cause in causes]
    if len(causes) > 1 and all(run is not None and run.kind is ControlKind.EVALUATION_MODE for run, _ in controls):
        # The last one's control ran with the others in evaluation mode, and left nothing. So it does again.
        controls = controls[-1:]
    if part_comparison.window.has_wrong_weights:
        controls.append((part_comparison.window.remedy, _confirm_weights))
    if part_comparison.state is not None and part_comparison.state.blamed:
        controls.append((part_comparison.state.control, _confirm_state))
    if part_comparison.backward.place is not None:
        controls.append((part_comparison.backward.control, _confirm_backward))
    control, confirm = controls[0] if len(controls) == 1 else (None, None)
    return confirm if control is not None and control.proves else None


def _prepare_bench(bench: Bench, comparison: Comparison, part_comparison: Comparison) -> tuple[Bench, Comparison]:
    """The bench with sketches of the micro-batches' gradients, and the comparison with the weights that fit.

    Where weights are not to blame, their fit is that of the first samples, which saves a pass.
    """
    reference = bench.reference or keep_sketch(bench.experiment, bench.experiment.full_batch())
    shares = reference.shares
    if shares is None and part_comparison.window.has_wrong_weights:
        shares = replace(bench, reference=reference).sketch_micro_batches(reference.full)[0]
    bench = replace(bench, reference=replace(reference, shares=shares))
    changes = State(part_comparison.state.changes) if part_comparison.state is not None else None
    comparison = replace(
        comparison,
        window=replace(
            comparison.window, fit=fit_runs([shares]) if shares is not None else _scale_fit(comparison, part_comparison)
        ),
        state=changes,
        repeatability=part_comparison.repeatability,
        failures=part_comparison.failures,
        left=bench.total,
    )
    return bench, comparison


def _scale_fit(comparison: Comparison, part_comparison: Comparison) -> WeightFit | None:
    """The fit of the first samples without its weights, which belong to other micro-batches."""
    fit = part_comparison.window.fit
    norms = [
        math.hypot(*(row.reference_norm for row in each.compared.rows if math.isfinite(row.reference_norm)))
        for each in (part_comparison, comparison)
    ]
    # sampling noise falls with the square root of the number of samples
    share = math.sqrt(part_comparison.batch_size / comparison.batch_size) * norms[0] / max(norms[1], TINY)
    return fit and replace(fit, weights=(), noise=fit.noise * share, samples=part_comparison.batch_size)


def _translate_fit(
    fit: WeightFit,
    sketches: Sketches | None,
    weight_facts: AccumulationWindow,
    part_weights: AccumulationWindow,
    floor: float,
) -> WeightFit | None:
    """The weights with the meaning that those of the first samples have; None where none explain everything."""
    # In working precision only the first digits of fitted weights are right: enough to choose between candidates that
    # have a meaning. Those of the first samples were fitted in float64 and are exact.
    if sketches is None or part_weights.fit is None:
        return None
    before = part_weights.fit.weights
    part_amounts = (part_weights.valid_targets, part_weights.sizes)
    amounts = (weight_facts.valid_targets, weight_facts.sizes)
    candidates = [
        tuple(amount / sum(full) for amount in full)
        for first, full in zip(part_amounts, amounts, strict=True)
        if first and are_shares(before, first)
    ]
    factors = [right / used for right, used in zip(before, part_weights.used, strict=False) if used]
    if is_constant(factors):
        ratios = [len(part_weights.sizes) / len(weight_facts.sizes), sum(part_weights.sizes) / sum(weight_facts.sizes)]
        times = [1.0, *ratios, *(1 / ratio for ratio in ratios)]
        candidates += [tuple(factors[0] * time * used for used in weight_facts.used) for time in times]
    for weights_ in candidates:
        residual = sketches.left_by(sketches.full.new_tensor(weights_))
        if residual <= floor:
            return replace(fit, weights=weights_, residual=residual)
    return None


def _confirm_weights(bench: Bench, comparison: Comparison, part_comparison: Comparison) -> Comparison:
    """Accumulates with the weights that fit all micro-batches.

    They need a meaning. Where those of the first samples had none and fitted at moved parameters too, it is enough that
    they leave nothing.
    """
    fit, before = comparison.window.fit, part_comparison.window.fit
    if part_comparison.window.counts:
        window_counts = counts.find_counts(bench, comparison.window.used)
        if window_counts is None:
            return comparison
        weight_facts = replace(
            comparison.window,
            counts=window_counts.counts,
            remedy=_mark_as_before(part_comparison.window.remedy, window_counts.control),
        )
        weight_facts = replace(weight_facts, place=part_comparison.window.place)
        return replace(
            comparison, window=weight_facts, left=window_counts.control.left, cleared=window_counts.control.rounding
        )
    if not bench.experiment.is_float64 and fit is not None and bench.reference is not None:
        fit = _translate_fit(
            fit, bench.reference.shares, comparison.window, part_comparison.window, _largest_rest(bench)
        )
    if fit is None or before is None:
        return comparison
    alike = bench.experiment.is_float64 and fit.determined and weights.is_explanation(bench, comparison, fit)
    if not weights.is_meaningful(bench, comparison, fit) and (
        weights.has_meaning(part_comparison.window, before) or not alike
    ):
        return comparison
    comparison = weights.try_weights(bench, comparison, fit)
    weight_facts = comparison.window
    weight_facts = replace(
        weight_facts,
        place=part_comparison.window.place,
        remedy=_mark_as_before(part_comparison.window.remedy, weight_facts.remedy),
    )
    return replace(comparison, window=weight_facts, forward=part_comparison.forward)


def _mark_as_before(part: ControlRun | None, run: ControlRun | None) -> ControlRun | None:
    """A repair on the full batch, which holds on a second batch if that of the first samples does."""
    return replace(run, holds=part.holds) if part is not None and run is not None else run


def _confirm_state(bench: Bench, comparison: Comparison, part_comparison: Comparison) -> Comparison:
    """Runs the control of the state again, and where more changes than the blamed state, one of that state only."""
    if part_comparison.state is None or part_comparison.state.control is None:
        return comparison
    control = bench.run(*part_comparison.state.control.interventions)
    # Pinning state that must be set once would keep it uninitialised; pinning all of it is the control that was run.
    is_pinned = control.kind in (ControlKind.STATE_PINNED, ControlKind.STATE_PRIMED_AND_PINNED)
    blamed, changes = part_comparison.state.blamed, state.read_changes(part_comparison.state.changes)
    if is_pinned and control.rounding and len(blamed) < len(changes) and not bench.run(state.pin(blamed)).rounding:
        return comparison
    remedies = (control,) if part_comparison.state.remedies else ()
    state_facts = replace(part_comparison.state, control=control, remedies=remedies)
    return replace(
        comparison, state=state_facts, forward=part_comparison.forward, left=control.left, cleared=control.rounding
    )


def _confirm_backward(bench: Bench, comparison: Comparison, part_comparison: Comparison) -> Comparison:
    """Runs the control of the backward again, if the full batch's losses add up as those of the first samples do."""
    full, used = bench.reference.full.loss if bench.reference is not None else math.nan, comparison.window.used
    gap = abs(sum(w * loss for w, loss in zip(used, comparison.window.losses, strict=True)) - full) / max(
        abs(full), TINY
    )
    before = part_comparison.backward.control
    if not gap <= SAME_IN_FLOAT32 or before is None:
        return comparison
    control = bench.run(*before.interventions)
    # gradients that it pins differ where their values agree: that was measured at the boundaries of modules
    control = replace(control, values_differed=before.values_differed)
    if not control.proves:
        return comparison
    forward = replace(part_comparison.forward, loss_gap=gap, shares=used)
    backward = replace(part_comparison.backward, control=control)
    return replace(comparison, forward=forward, backward=backward, left=control.left, cleared=True)


def _confirm_causes(bench: Bench, comparison: Comparison, part_comparison: Comparison) -> Comparison:
    """Confirms the last cause with the layers of those before it in evaluation mode, as it was found."""
    *earlier, last = part_comparison.forward.causes
    last_facts = replace(part_comparison, forward=replace(part_comparison.forward, causes=(last,)))
    controls = [cause.control for cause in earlier if cause.control is not None]
    neutral_bench = bench.neutralise(*(each for control in controls for each in control.interventions))
    comparison = _confirm_cause(neutral_bench, comparison, last_facts)
    if not (earlier and comparison.cleared):
        return comparison
    # what each makes alone was measured in the first samples, whose controls the earlier ones keep
    (confirmed,) = comparison.forward.causes
    causes = [_mark_as_part(cause, part_comparison) for cause in earlier]
    causes.append(replace(confirmed, difference_alone=last.difference_alone, explained=last.explained))
    return replace(comparison, forward=replace(comparison.forward, causes=tuple(causes)))


def _mark_as_part(cause: Cause, part_comparison: Comparison) -> Cause:
    """The cause with a control that says on which samples it ran."""
    assert cause.control is not None
    what = f"{cause.control.what} on the first {part_comparison.batch_size} samples"
    # how many samples of the whole batch differ is not known
    suspect = replace(cause.suspect, samples=0)
    return replace(cause, suspect=suspect, control=replace(cause.control, what=what))


def _confirm_cause(bench: Bench, comparison: Comparison, part_comparison: Comparison) -> Comparison:
    """Runs the control that helped, and the repairs, which must have the same results as on the first samples."""
    (before,) = part_comparison.forward.causes
    # Where GroupNorm replaces the layers, the repair shows what the control would: without these layers nothing is
    # left. It is run instead of the control.
    in_evaluation_mode = before.control is not None and before.control.kind is ControlKind.EVALUATION_MODE
    replaced = proof.run_replacement(bench, before.suspect) if in_evaluation_mode else None
    if replaced is not None:
        explained = 1.0 - replaced.left / bench.total
        confirmed = replace(before, remedies=(replaced,), explained=explained, difference_alone=bench.total)
        forward = replace(part_comparison.forward, causes=(_mark_as_part(confirmed, part_comparison),))
        return replace(comparison, forward=forward, left=replaced.left, cleared=replaced.rounding)
    cause = proof.rerun_cause(bench, replace(before, suspect=replace(before.suspect, samples=0)))
    has_same_repairs = _list_repairs(before.remedies, 1.0) == _list_repairs(cause.remedies, _largest_rest(bench))
    if cause.control is None or not cause.control.has_power or not has_same_repairs:
        return comparison
    forward = replace(part_comparison.forward, causes=(cause,))
    return replace(comparison, forward=forward, left=cause.control.left, cleared=cause.control.rounding)


def _list_repairs(runs: tuple[ControlRun, ...], most: float) -> list[tuple[object, bool]]:
    return [(run.kind, run.rounding and run.left <= most) for run in runs]
