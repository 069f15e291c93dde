"""Controls of an audit: further runs that decide what the comparison alone leaves open, of one process or of ranks.

Each asks the record whether it is called for, makes runs with one thing changed, and returns what they tell. Two decide
by the weights: by what steps, or a script that moves them itself, make of the gradients. Those of ranks run the same
ranks again, with one thing put right or held still.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import torch

from gaverify.audit.backward_controls import control_backward
from gaverify.audit.changes import (
    Change,
    ClearGradients,
    DifferentiateGathers,
    DifferentiateTerm,
    FreezeBuffers,
    ScaleLosses,
    SynchroniseGradients,
    UndoSteps,
    WeightMicroBatches,
)
from gaverify.audit.coupling_controls import find_coupling
from gaverify.audit.judgement import working_unit
from gaverify.audit.outcome import is_explained
from gaverify.audit.rank_facts import compare_weighed_run, gradient_difference, rank_facts
from gaverify.audit.ranks import RankedRun
from gaverify.audit.reading import RecordedRun
from gaverify.audit.running import Trial
from gaverify.audit.stages import compare_changes, fit_gradients, fit_terms
from gaverify.audit.state_controls import control_state
from gaverify.audit.transform_controls import find_transformed_gradients
from gaverify.collective.facts import with_shares
from gaverify.errors import ProblemError
from gaverify.records.audit import Overwritten, Record, UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.events import Backward
from gaverify.records.facts import facts_of_loop
from gaverify.records.stages import Stage, StageComparison
from gaverify.records.windows import common_rounds, rounds_of, windows_of
from gaverify.rules.calls import clipped_inside
from gaverify.rules.scale import fitted_weights_of, multipliers_of
from gaverify.thresholds import FIT_FLOAT32, MANY_UNITS, SMALLEST_FAULT, TENTH, TOO_SMALL_TO_CLIP
from gaverify.verdict.criteria import floors_allowed

_OTHERWISE = ((1, 1.3), (2, 1.7), (3, 2.9))  # directions of weights, and what losses are multiplied by
_MOST_HELD = 64  # micro-batches that the control with undone steps runs at most


def control_noise_floor(trial: Trial, record: Record) -> Record:
    """The control for differences near the noise floor: a floor that one run measured may be small by chance.

    A gradient whose terms cancel is made of the rounding of each of them, which moved weights hardly change where they
    are small. So the losses are multiplied by odd factors, which rounds every term otherwise, and the weights are moved
    in more directions; the largest floor counts.
    """
    rows = [row for update in record.updates if update.differs for row in update.parameters]
    differences = [row.relative_difference for row in rows if row.outcome is Outcome.DIVERGENT]
    if not differences or not all(difference < SMALLEST_FAULT for difference in differences):
        return record
    more_perturbed = trial.runner.record(
        *(trial.perturbed_control(seed, ScaleLosses(factor)) for seed, factor in _OTHERWISE)
    )
    factors = [factor for _, factor in _OTHERWISE]
    return replace(record, updates=trial.compare(extra_perturbed=[*zip(more_perturbed, factors, strict=True)]))


def control_clipping(trial: Trial, record: Record) -> Record:
    """The control for clipping inside windows, and for gradients that a script changes by hand.

    All runs again, with losses too small to be clipped.

    Dividing, centralising or summing elsewhere treats a gradient alike whatever its size; clipping lets a small one
    pass. So what the optimizers see of small gradients is what the script makes of them before it clips.
    """
    if not any(update.unclear for update in record.updates) and not clipped_inside(facts_of_loop(record)):
        return record
    control = trial.repeat_with(ScaleLosses(TOO_SMALL_TO_CLIP), shown_as="unclipped")
    small = tuple(replace(update, decided=Stage.UNCLIPPED) for update in control.compare(unclipped=True))
    windows = windows_of(control.accumulated.events, control.numbers)
    weighed_record = control_weights(control, replace(record, updates=small, windows=windows))
    record = replace(record, weighed=weighed_record.weighed, made=weighed_record.made)
    judged_updates = {update.number: update for update in small if update.judged}
    updates = tuple(
        _without_clips(update, judged_updates[update.number])
        if update.unclear and update.number in judged_updates
        else update
        for update in record.updates
    )
    return replace(record, updates=updates, unclipped=small)


def _without_clips(update: UpdateComparison, small: UpdateComparison) -> UpdateComparison:
    """Returns an update that gradients changed by hand left unclear, decided as in the control."""
    used = next((stage for stage in small.stages if stage.stage is Stage.USED), None)
    if used is None or used.outcome is Outcome.INCONCLUSIVE or small.unrepeatable:
        return update
    decided = replace(update, unclear=False, stages=(*update.stages, replace(used, stage=Stage.UNCLIPPED)))
    if used.outcome is Outcome.EQUIVALENT and update.outcome is Outcome.DIVERGENT:
        # The same sum once nothing is clipped, another where it is: clipped at another place than the full batch's.
        return decided
    return replace(
        decided,
        outcome=used.outcome,
        parameters=small.parameters,
        fit=small.fit,
        noise=small.noise,
        decided=Stage.UNCLIPPED,
    )


def control_terms(trial: Trial, record: Record) -> Record:
    """The control for a loss that is a sum: both runs up to the update that differs, with each term alone.

    Nothing is told unless the terms' gradients add up to those of the whole, in both runs. The full batch's steps are
    led as well: its term alone would train other weights for the next update.
    """
    update = record.divergent
    if update is None or is_explained(record):
        return record
    windows = [window for window in (*record.full_windows, *record.windows) if window.number == update.number]
    counts = {backward.terms for window in windows for backward in window.of(Backward)}
    count = counts.pop() if len(windows) == 2 and len(counts) == 1 else 0  # else the runs have other numbers of them
    if count < 2:
        return record
    alone = []
    for term in range(1, count + 1):
        full, accumulated = trial.runner.record(
            trial.full_batch_control(DifferentiateTerm(term), updates=update.number, shown_as="terms"),
            trial.control("accumulated", DifferentiateTerm(term), updates=update.number, shown_as="terms"),
        )
        alone.append((full, accumulated))
    loss_terms = fit_terms((trial.full, trial.accumulated), alone, record.tolerance, update.number)
    return replace(record, terms=loss_terms)


def control_overwriting(trial: Trial, record: Record) -> Record:
    """The control for gradients that each backward pass may set: the accumulated run, cleared before each of them.

    Where the same gradient reaches the step, those before the last pass never did. What such passes add is that of the
    next one less their own, so that weights which fall from pass to pass give the full batch's gradient.
    """
    update_and_fit = fitted_weights_of(record)
    if (
        update_and_fit is None
        or len(update_and_fit[1].multipliers) < 2
        or any(a <= b for a, b in pairwise((*update_and_fit[1].multipliers, 0.0)))
    ):
        return record
    number = update_and_fit[0].number
    cleared = trial.run(trial.control("accumulated", ClearGradients(), updates=number))
    difference_left = gradient_difference(trial.accumulated, cleared, update=number)
    if not difference_left <= record.tolerance or not cleared.meta["cleared_gradients"]:
        return record  # a script that moves its gradients away after each pass leaves nothing to clear
    return replace(record, overwritten=Overwritten(difference_left, *(cleared.meta["setter"] or (None, None))))


def control_weights(trial: Trial, record: Record) -> Record:
    """The control for weights that fit: the accumulated run with every loss of the update times what it should count.

    A fit is arithmetic on recorded gradients. What the script makes of such losses (with its state, its hooks, its
    limits) only a run shows.
    """
    update, right = record.divergent, multipliers_of(record)
    shares = trial.shares(record, right)
    has_control = record.overwritten is not None or record.weighed is not None
    if update is None or not shares or has_control or record.ranks > 1:
        return record
    control = trial.control("accumulated", WeightMicroBatches(shares), updates=update.number, shown_as="weights")
    control_run = trial.run(control)
    passes = [event for event in control_run.events if isinstance(event, Backward) and event.update == update.number]
    loss_line = next((backward.origin.made for backward in reversed(passes) if backward.origin.made), None)
    return replace(
        record,
        weighed=compare_weighed_run(trial.full, control_run, record),
        made=(loss_line[0], loss_line[1]) if loss_line else None,
    )


def control_inner_steps(trial: Trial, record: Record) -> Record:
    """The control for a step inside the window: once more with every step undone, then fit all micro-batches."""
    first = record.first
    steps = record.expected(first) if first is not None else None
    if first is None or steps is None or not 0 < first.backwards < steps <= _MOST_HELD:
        return record
    frozen_run = trial.run(trial.control("accumulated", UndoSteps(), updates=steps, led=False))
    samples = [frozen_run.samples(round_) for round_ in rounds_of(frozen_run.events)[:steps]]
    # of a step inside the backward pass, which may clear what it has used, only what it was given was seen
    increments_seen = [
        any(bool(change.any()) for added in sample.increments for change in added.values()) for sample in samples
    ]
    changes_of_rounds = [
        sample.increments if any_ else [sample.of("final")]
        for sample, any_ in zip(samples, increments_seen, strict=True)
    ]
    increments = [increment for members in changes_of_rounds for increment in members][:steps]
    full_samples = trial.full.samples(rounds_of(trial.full.events)[0])
    totals = {at: sum(step[at] for step in increments if at in step) for at in full_samples.summed_gradients}
    used = {at: total for at, total in totals.items() if isinstance(total, torch.Tensor)}
    if len(used) < len(totals):
        return record  # a step inside the backward left no gradient to be seen
    target, stretches = full_samples.summed_gradients, full_samples.of("stretches")
    fit = fit_gradients(target, stretches, used, increments)
    if fit is not None and full_samples.by_change:
        # What the script takes away from its weights is the gradient times a rate that is not known.
        target = {at: part * fit.factor for at, part in target.items()}
        fit = fit_gradients(target, stretches, used, increments)
    return replace(record, steps_undone=fit)


def control_own_steps(trial: Trial, record: Record) -> Record:
    """The control for a step that makes something else of the same gradient: with the script's own gradients.

    Updates whose weights change alike then have no fault. Their gradients differ by a factor that the step takes out
    again: a step that divides by K, a lower rate.
    """
    if trial.is_by_hand or not any(update.other_step for update in record.updates):
        return record
    full, own_run = trial.full, trial.run(trial.control("accumulated", led=False))
    accepted = tuple(_accept_factor(update, full, own_run) for update in trial.compare(own_run))
    pairs = zip(record.updates, accepted, strict=False)
    takes_factor = any(after.step_takes_factor and before.other_step for before, after in pairs)
    return replace(record, updates=accepted) if takes_factor else record


def control_change(trial: Trial, record: Record) -> Record:
    """The control for a script that moves its weights itself: the full batch again, with losses half as large.

    Weights that change otherwise for half the gradient (SGD) show what the script makes of `.grad` in its step, and of
    sums that it keeps elsewhere. Those that do not (Adam, a sign, a norm) show nothing of its size. Nor is it asked
    for where their change tells what the gradients do, or agrees where it alone was seen.
    """
    if not trial.is_by_hand:
        return record
    full, accumulated = trial.full, trial.accumulated
    if not any(_needs_half(update, full, accumulated) for update in record.updates):
        return record
    half = trial.run(trial.control("full", ScaleLosses(0.5), shown_as="unclipped"))
    return replace(record, updates=decide_by_change(record.updates, full, accumulated, half))


def decide_by_change(
    updates: tuple[UpdateComparison, ...], full: RecordedRun, accumulated: RecordedRun, half: RecordedRun
) -> tuple[UpdateComparison, ...]:
    """Returns the updates of a script that moves its weights itself, with what their change tells.

    Args:
        updates: The comparisons of what the script was seen to use.
        full: The full-batch run.
        accumulated: The accumulated run.
        half: The full-batch run with losses half as large.
    """
    first = common_rounds(full.events, half.events)[0]
    halved = compare_changes(full.samples(first), half.samples(first), working_unit(full))
    if halved is None or halved.outcome is not Outcome.DIVERGENT or halved.relative_difference < TENTH:
        return tuple(
            replace(update, outcome=Outcome.INCONCLUSIVE) if update.decided is Stage.CHANGE else update
            for update in updates
        )
    decided = []
    for update in updates:
        change = _change(update, full, accumulated)
        if update.decided is Stage.CHANGE or change is None:
            decided.append(update)
        elif update.outcome is Outcome.EQUIVALENT and change.outcome is Outcome.DIVERGENT:
            decided.append(replace(update, stages=(*update.stages, change)))
        else:
            decided.append(_accept_factor(update, full, accumulated))
    return tuple(decided)


def _needs_half(update: UpdateComparison, full: RecordedRun, accumulated: RecordedRun) -> bool:
    if update.decided is Stage.CHANGE:
        return update.differs
    change = _change(update, full, accumulated)
    return change is not None and change.outcome is not update.outcome


def _change(
    update: UpdateComparison, full: RecordedRun, own_run: RecordedRun, residual: float = 0.0
) -> StageComparison | None:
    """How far the weights change otherwise in an update, but for what a factor leaves; None where it is not judged."""
    if not update.judged:
        return None
    unit, round_ = working_unit(full), common_rounds(full.events, own_run.events)[update.number - 1]
    noise = max(MANY_UNITS * unit, floors_allowed(unit) * update.noise) + residual
    return compare_changes(full.samples(round_), own_run.samples(round_), unit, noise)


def _accept_factor(update: UpdateComparison, full: RecordedRun, own_run: RecordedRun) -> UpdateComparison:
    """Returns an update, as equivalent where its gradient differs by a factor and its weights change alike."""
    residual = update.fit.factor_residual if update.fit is not None else math.inf
    if update.outcome is not Outcome.DIVERGENT or not residual < FIT_FLOAT32:
        return update
    change = _change(update, full, own_run, residual)
    if change is None or change.outcome is not Outcome.EQUIVALENT:
        return update
    stages = (*update.stages, change)
    return replace(update, outcome=Outcome.EQUIVALENT, step_takes_factor=True, stages=stages)


def with_rank_facts(trial: Trial, record: Record) -> Record:
    """Returns the record with what its ranks did."""
    accumulated = trial.accumulated
    if not isinstance(accumulated, RankedRun) or not record.updates:
        return record
    facts = rank_facts(trial.full, accumulated, record.updates[0], record.unit)
    windows = tuple(windows_of(run.events, trial.numbers) for run in accumulated.ranks[1:])
    return replace(record, together=facts, rank_windows=windows)


def control_ranks(trial: Trial, record: Record) -> Record:
    """Returns the record with the controls that its ranks call for."""
    ranks = record.together
    if ranks is None:
        return record

    # What a script reduces by hand is right or wrong where the optimizers see it.
    stages = record.updates[0].stages if record.updates else ()
    at_the_step = any(stage.stage is Stage.USED and stage.outcome is Outcome.DIVERGENT for stage in stages)

    def difference_left(change: Change, *, also_full: bool = False) -> float:
        """What a changed run of the ranks leaves, against the full-batch run, or against that with the same change."""
        try:
            full = trial.run(trial.control("full", change, shown_as="ranks")) if also_full else trial.full
            accumulated = trial.run(trial.control("accumulated", change, source=full, shown_as="ranks"))
        except ProblemError:
            return math.nan
        return gradient_difference(full, accumulated, summed=not at_the_step)

    if ranks.stepped_without:
        ranks = replace(ranks, sync_control=difference_left(SynchroniseGradients(), also_full=True))
    elif ranks.at_fault and (ranks.apart > ranks.rounding or ranks.ends_unreduced):
        ranks = replace(ranks, sync_control=difference_left(SynchroniseGradients()))
    elif ranks.at_fault and ranks.buffers_apart:
        ranks = replace(ranks, frozen_control=difference_left(FreezeBuffers(ranks.buffers_apart), also_full=True))
    elif ranks.at_fault and ranks.gathers and not ranks.shares_to_try:
        ranks = replace(ranks, gather_control=difference_left(DifferentiateGathers()))
    elif ranks.at_fault:
        ranks = with_shares(ranks, lambda shares: difference_left(WeightMicroBatches(shares)))
    return replace(record, together=ranks)


def run_controls(trial: Trial, record: Record, *, ranked: bool) -> Record:
    """Returns the record with what further runs show, where it calls for them; one that fails shows nothing.

    Args:
        trial: The runs that were compared.
        record: What they show.
        ranked: The accumulated run trains in several processes.
    """
    of_weights = control_inner_steps, control_overwriting, control_weights, find_transformed_gradients, control_backward
    alone = () if ranked else (*of_weights, control_terms)
    together = control_noise_floor, with_rank_facts, control_clipping, control_change, control_own_steps, control_ranks
    for control in (*together, *alone, find_coupling, control_state):
        with suppress(ProblemError):
            record = control(trial, record)
    return record
