"""Controls of an audit: further runs that decide what the comparison alone leaves open, of one process or of ranks.

A control reads from the record whether it is needed, makes runs with a few changes, and returns the record with the
answer. One compares the changes of the weights beside the gradients: those that steps make of their own gradients.
The controls of ranks run the same ranks again, with one thing corrected or pinned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import torch

from gaverify.audit.bench import ControlledRuns, ScriptBench
from gaverify.audit.code_controls import (
    control_backward,
    control_carried_state,
    control_state,
    find_transformed_gradients,
)
from gaverify.audit.coupling_controls import find_coupling
from gaverify.audit.first_difference import find_first_difference
from gaverify.audit.job import (
    Change,
    ClearGradients,
    DifferentiateGathers,
    DifferentiateTerm,
    Role,
    ScaleLosses,
    SynchroniseGradients,
    UndoSteps,
    UseEvaluationMode,
    WeightMicroBatches,
)
from gaverify.audit.judgement import working_unit
from gaverify.audit.outcome import is_explained
from gaverify.audit.ranks import RankedRun, rank_facts
from gaverify.audit.reading import RecordedRun, Samples
from gaverify.audit.running import Trial
from gaverify.audit.stages import compare_changes, fit_gradients, fit_terms
from gaverify.collective.facts import with_shares
from gaverify.errors import ProblemError, TimeUp
from gaverify.records.audit import Overwritten, Record, Stage, StageComparison, UpdateComparison
from gaverify.records.comparison import comparison_of
from gaverify.records.events import Backward
from gaverify.records.outcomes import Outcome
from gaverify.records.windows import common_rounds, rounds_of, windows_of
from gaverify.rules.calls import clipped_inside
from gaverify.rules.scale import fitted_weights_of, multipliers_of
from gaverify.search.bench import Intervention
from gaverify.thresholds import FIT_FLOAT32, MANY_UNITS, SMALLEST_FAULT, TENTH, TOO_SMALL_TO_CLIP
from gaverify.verdict.criteria import floors_allowed

_MORE_FLOORS = ((1, 1.3), (2, 1.7), (3, 2.9))  # seeds of directions, and factors on losses: no powers of two
_ROLES: tuple[Role, ...] = ("full", "accumulated")
_MOST_UNDONE = 64  # micro-batches that the control with undone steps runs at most


def control_noise_floor(trial: Trial, record: Record) -> Record:
    """Measures the noise floor again if all differences are near it: one run may measure a floor that is too small.

    The gradient of terms that cancel consists of their rounding. Small weights that move by a roundoff hardly change
    that rounding. So the losses are multiplied by odd factors as well, which rounds every term differently. The full
    batch's terms may cancel exactly where those of micro-batches do not, so both runs are perturbed. The largest floor
    counts.
    """
    shares = [share for update in record.updates if update.judged for share in _shares_of_differences(update)]
    if not shares or not all(share < SMALLEST_FAULT for share in shares):
        return record
    more_perturbed = trial.runner.record(
        *(
            trial.perturbed_control(seed, ScaleLosses(factor), role=role)
            for seed, factor in _MORE_FLOORS
            for role in _ROLES
        )
    )
    factors = [factor for _, factor in _MORE_FLOORS for _ in _ROLES]
    return replace(record, updates=trial.compare(extra_perturbed=[*zip(more_perturbed, factors, strict=True)]))


def _shares_of_differences(update: UpdateComparison) -> list[float]:
    """Returns the differences of parameters that are not equivalent, relative to the gradient of all parameters.

    A gradient that is zero in exact arithmetic consists of rounding, so that its own size says nothing.
    """
    size = math.hypot(*(row.reference_norm for row in update.parameters))
    open_rows = [row for row in update.parameters if row.outcome is not Outcome.EQUIVALENT]
    return [row.difference_norm / size if size else math.inf for row in open_rows]


def control_clipping(trial: Trial, record: Record) -> Record:
    """Makes all runs again with losses too small to be clipped, if a window clips or a script edits its gradients.

    Clipping lets a small gradient pass. Other edits (dividing, centralising, summing elsewhere) do not depend on its
    size, so that the optimizers see them alone.
    """
    if not any(update.unclear for update in record.updates) and not clipped_inside(comparison_of(record)):
        return record
    control = trial.repeat_with(ScaleLosses(TOO_SMALL_TO_CLIP), shown_as="unclipped")
    unclipped = tuple(replace(update, decided=Stage.UNCLIPPED) for update in control.compare(unclipped=True))
    calls = replace(record.calls, windows=windows_of(control.accumulated.events, control.numbers))
    # weights that fit are tried on the small losses, too: clipping would hide what they do
    with_weights = control_weights(control, replace(record, updates=unclipped, calls=calls))
    trial.runner.drop_copies(control.full)
    judged_updates = {update.number: update for update in unclipped if update.judged}
    updates = tuple(
        _decide_without_clips(update, judged_updates[update.number])
        if update.unclear and update.number in judged_updates
        else update
        for update in record.updates
    )
    return replace(record, updates=updates, controls=replace(with_weights.controls, unclipped=unclipped))


def _decide_without_clips(update: UpdateComparison, unclipped: UpdateComparison) -> UpdateComparison:
    """Returns an update that edited gradients left unclear, decided as in the control."""
    used = next((stage for stage in unclipped.stages if stage.stage is Stage.USED), None)
    if used is None or used.outcome is Outcome.INCONCLUSIVE or unclipped.unrepeatable:
        return update
    decided = replace(update, unclear=False, stages=(*update.stages, replace(used, stage=Stage.UNCLIPPED)))
    if used.outcome is Outcome.EQUIVALENT and update.outcome is Outcome.DIVERGENT:
        # The sums agree once nothing is clipped: the script clips at another place than in the full-batch run.
        return decided
    return replace(
        decided,
        outcome=used.outcome,
        parameters=unclipped.parameters,
        window=update.window.refit(unclipped.window.fit),
        noise=unclipped.noise,
        decided=Stage.UNCLIPPED,
    )


def control_terms(trial: Trial, record: Record) -> Record:
    """Makes both runs with each term of the loss alone, up to the update that differs, if the loss is a sum.

    The terms count if their gradients add up to those of the whole loss, in both runs.
    """
    update = record.divergent
    if update is None or is_explained(record):
        return record
    windows = [
        window for window in (*record.calls.full_windows, *record.calls.windows) if window.number == update.number
    ]
    counts = {backward.terms for window in windows for backward in window.of(Backward)}
    count = counts.pop() if len(windows) == 2 and len(counts) == 1 else 0  # 0: the runs differ in their terms
    if count < 2:
        return record
    runs_of_terms = []
    for term in range(1, count + 1):
        full, accumulated = trial.runner.record(
            # led: one term alone would train other weights for the next update
            trial.full_batch_control(DifferentiateTerm(term), updates=update.number, shown_as="terms"),
            trial.control("accumulated", DifferentiateTerm(term), updates=update.number, shown_as="terms"),
        )
        runs_of_terms.append((full, accumulated))
    loss_terms = fit_terms((trial.full, trial.accumulated), runs_of_terms, record.tolerance, update.number)
    return replace(record, controls=replace(record.controls, terms=loss_terms))


def control_overwriting(trial: Trial, record: Record) -> Record:
    """Clears the gradients before each backward pass, if each pass may overwrite those of the passes before it.

    If the same gradient reaches the step, only the last pass ever reached it. A pass that overwrites seems to add its
    own gradient less that of the pass before: the weights that fit fall from pass to pass.
    """
    fit, update = fitted_weights_of(record), record.divergent
    if fit is None or update is None or len(fit.multipliers) < 2:
        return record
    # Weights of passes with as many samples are equal but for rounding: that they fall by it says nothing.
    multipliers, tolerance = fit.multipliers, record.tolerance
    if not all(a - b > tolerance * abs(a) for a, b in pairwise((*multipliers, 0.0))):
        return record
    bench = ScriptBench(trial, record, update)
    clearing = Intervention("gradients cleared", in_reference=False, changes=(ClearGradients(),))
    cleared = bench.make_runs(clearing).accumulated
    difference_left = bench.difference_left(ControlledRuns((clearing,), trial.accumulated, cleared))
    if not difference_left <= record.tolerance or not cleared.closing.control.cleared:
        return record  # a script that moves its gradients away after each pass leaves nothing to clear
    overwritten = Overwritten(difference_left, *(cleared.closing.control.setter or (None, None)))
    return replace(record, controls=replace(record.controls, overwritten=overwritten))


def control_weights(trial: Trial, record: Record) -> Record:
    """Makes the accumulated run with the weights that fit on its losses, if there are such weights.

    A fit is arithmetic on recorded gradients. Only a run shows what the script's state, hooks and limits do with such
    losses.
    """
    update, right = record.divergent, multipliers_of(record)
    has_control = record.controls.overwritten is not None or record.controls.weighted_run is not None
    if update is None or has_control:
        return record
    bench = ScriptBench(trial, record, update, "weights")
    # Ranks have a control of their own, which multiplies the losses of each rank: `control_ranks`.
    weighing = bench.weigh(right)
    if weighing is None:
        return record
    runs = bench.make_runs(weighing)
    passes = [
        event for event in runs.accumulated.events if isinstance(event, Backward) and event.update == update.number
    ]
    loss_line = next((backward.origin.made for backward in reversed(passes) if backward.origin.made), None)
    results = replace(
        record.controls,
        weighted_run=bench.compare(runs),
        loss_line=(loss_line[0], loss_line[1]) if loss_line else None,
    )
    return replace(record, controls=results)


def control_inner_steps(trial: Trial, record: Record) -> Record:
    """Undoes every step, if the accumulated run steps inside the window, and fits the gradients of micro-batches."""
    first = record.calls.first
    steps = record.calls.expected_passes(first) if first is not None else None
    # A window that has all its backward passes was not cut by an early step.
    if first is None or steps is None or not 0 < first.backwards < steps <= _MOST_UNDONE:
        return record
    # Not led: a step with the full batch's gradient would show nothing of its micro-batch's.
    run_undone = trial.run(trial.control("accumulated", UndoSteps(), updates=steps, led=False))
    samples = [run_undone.samples(round_) for round_ in rounds_of(run_undone.events)[:steps]]
    increments_by_step = [
        # a step inside the backward pass may clear gradients before they are seen: then those that it used count
        sample.increments if _has_increments(sample) else [sample.of("final")]
        for sample in samples
    ]
    increments = [increment for members in increments_by_step for increment in members][:steps]
    full_samples = trial.full.samples(rounds_of(trial.full.events)[0])
    totals = {at: sum(step[at] for step in increments if at in step) for at in full_samples.summed_gradients}
    used = {at: total for at, total in totals.items() if isinstance(total, torch.Tensor)}
    if len(used) < len(totals):
        return record  # `sum` of nothing is 0: a step inside the backward pass left no gradient to be seen
    target, stretches = full_samples.summed_gradients, full_samples.stretches
    fit = fit_gradients(target, stretches, used, increments)
    return replace(record, controls=replace(record.controls, steps_undone=fit))


def _has_increments(samples: Samples) -> bool:
    return any(bool(change.any()) for increment in samples.increments for change in increment.values())


def control_own_steps(trial: Trial, record: Record) -> Record:
    """Lets the accumulated run step with its own gradients, if its steps treat the same gradient differently.

    Updates whose weights then change alike have no fault: the step takes out the factor by which the gradients differ.
    It divides by K, or has a lower learning rate.
    """
    if trial.steps_itself:
        return _control_steps_of_script(trial, record)
    if not any(update.other_step for update in record.updates):
        return record
    full, own_run = trial.full, trial.run(trial.control("accumulated", led=False))
    accepted = tuple(_accept_factor(update, full, own_run) for update in trial.compare(own_run))
    pairs = zip(record.updates, accepted, strict=False)
    takes_factor = any(after.step.takes_factor and before.other_step for before, after in pairs)
    return replace(record, updates=accepted) if takes_factor else record


def _control_steps_of_script(trial: Trial, record: Record) -> Record:
    """Lets the change of the weights decide with the gradients, if the script makes its steps itself.

    Nothing can give such a step the full batch's gradient. So the full-batch run with half the loss tells whether the
    step shows the gradient's size: Adam, a sign or a norm does not.
    """
    full, accumulated = trial.full, trial.accumulated
    changes = [_compare_change(update, full, accumulated) for update in record.updates]
    pairs = [*zip(record.updates, changes, strict=True)]
    if all(change is None or change.outcome is update.outcome for update, change in pairs):
        return replace(record, updates=tuple(_mark_hidden_factor(update, change) for update, change in pairs))
    halved = trial.run(trial.control("full", ScaleLosses(0.5), shown_as="unclipped"))
    first = common_rounds(full.events, halved.events)[0]
    response = compare_changes(full.samples(first), halved.samples(first), working_unit(full))
    if response is None or response.outcome is not Outcome.DIVERGENT or response.relative_difference < TENTH:
        # A division inside such a step, of a gradient that `.grad` does not hold, cannot be told from a missing one.
        updates = (
            replace(
                update,
                step=replace(update.step, may_take_factor=_accept_factor(update, full, accumulated) is not update),
            )
            for update in record.updates
        )
        return replace(record, updates=tuple(updates))
    updates = (
        replace(update, stages=(*update.stages, change))
        if change is not None and update.outcome is Outcome.EQUIVALENT and change.outcome is Outcome.DIVERGENT
        else _accept_factor(update, full, accumulated)
        for update, change in pairs
    )
    return replace(record, updates=tuple(updates))


def _mark_hidden_factor(update: UpdateComparison, change: StageComparison | None) -> UpdateComparison:
    """Returns an update, marked where its weights moved by another factor than its gradient differs by.

    A division on the line that moves a weight is not in `.grad` when that line begins, and is in the change.
    """
    used = next((stage for stage in update.stages if stage.stage is Stage.USED), None)
    if change is None or used is None or change.outcome is not Outcome.DIVERGENT or not used.norm_ratio > 0.0:
        return update
    is_hidden = abs(change.norm_ratio / used.norm_ratio - 1.0) > TENTH
    return replace(update, step=replace(update.step, may_take_factor=True)) if is_hidden else update


def _compare_change(
    update: UpdateComparison, full: RecordedRun, own_run: RecordedRun, residual: float = 0.0
) -> StageComparison | None:
    """Compares how weights change in an update, with `residual` allowed beside the noise; None if it is not judged."""
    if not update.judged:
        return None
    unit, round_ = working_unit(full), common_rounds(full.events, own_run.events)[update.number - 1]
    noise = max(MANY_UNITS * unit, floors_allowed(unit) * update.noise) + residual
    return compare_changes(full.samples(round_), own_run.samples(round_), unit, noise)


def _accept_factor(update: UpdateComparison, full: RecordedRun, own_run: RecordedRun) -> UpdateComparison:
    """Returns an update; it is equivalent if its gradient differs by one factor and its weights change alike."""
    residual = update.window.fit.factor_residual if update.window.fit is not None else math.inf
    if update.outcome is not Outcome.DIVERGENT or not residual < FIT_FLOAT32:
        return update
    change = _compare_change(update, full, own_run, residual)
    if change is None or change.outcome is not Outcome.EQUIVALENT:
        return update
    stages = (*update.stages, change)
    step = replace(update.step, takes_factor=True)
    return replace(update, outcome=Outcome.EQUIVALENT, step=step, stages=stages)


def add_rank_facts(trial: Trial, record: Record) -> Record:
    """Returns the record with the facts about its ranks."""
    accumulated = trial.accumulated
    if not isinstance(accumulated, RankedRun) or not record.updates:
        return record
    facts = rank_facts(trial.full, accumulated, record.updates[0], record.unit)
    windows = tuple(windows_of(run.events, trial.numbers) for run in accumulated.ranks[1:])
    return replace(record, together=facts, calls=replace(record.calls, rank_windows=windows))


def control_ranks(trial: Trial, record: Record) -> Record:
    """Makes the runs of the ranks that correct the likeliest fault, or pin what it depends on."""
    ranks = record.together
    if ranks is None or not record.updates:
        return record
    # Gradients that a script reduces by hand are right or wrong only where the optimizers see them.
    stages = record.updates[0].stages
    differs_at_step = any(stage.stage is Stage.USED and stage.outcome is Outcome.DIVERGENT for stage in stages)

    bench = ScriptBench(trial, record, record.updates[0], "ranks", summed=not differs_at_step)

    def difference_left(change: Change, *, also_full: bool = False) -> float:
        """The difference of a changed run of the ranks from the full-batch run, or from that with the same change."""
        intervention = Intervention("ranks changed", in_reference=also_full, changes=(change,))
        # A changed run may fail where the script's own does not: then it answers nothing, and the audit goes on.
        control = bench.attempt("a control of ranks", lambda: bench.run(intervention))
        return math.nan if control is None else control.left

    if ranks.reduction.stepped_without:
        ranks = replace(ranks, sync_control=difference_left(SynchroniseGradients(), also_full=True))
    elif ranks.at_fault and (ranks.replicas_differ or ranks.ends_unreduced):
        ranks = replace(ranks, sync_control=difference_left(SynchroniseGradients()))
    elif ranks.at_fault and ranks.replicas.buffers:
        ranks = replace(
            ranks, evaluation_mode_control=difference_left(UseEvaluationMode(ranks.replicas.buffers), also_full=True)
        )
    elif ranks.at_fault and ranks.gathers and not ranks.shares_to_try:
        ranks = replace(ranks, gather_control=difference_left(DifferentiateGathers()))
    elif ranks.at_fault:
        ranks = with_shares(ranks, lambda shares: difference_left(WeightMicroBatches(shares)))
    return replace(record, together=ranks)


def decide_outcome(trial: Trial, record: Record) -> Record:
    """Returns the record with the answers of the controls that may change its outcome, and the facts about its ranks.

    Args:
        trial: The runs that were compared.
        record: The facts of these runs.
    """
    deciding = control_noise_floor, add_rank_facts, control_clipping, control_own_steps
    return _run_controls(trial, record, deciding)


def explain_difference(trial: Trial, record: Record) -> Record:
    """Returns the record with the answers of the controls that look for the cause of a difference.

    Args:
        trial: The runs that were compared.
        record: The facts of these runs, with the outcome decided.
    """
    for_weights = (
        control_inner_steps,
        control_overwriting,
        control_weights,
        find_transformed_gradients,
        control_backward,
        control_terms,
    )
    for_one_process = () if trial.runner.request.has_ranks else for_weights
    for_all = control_carried_state, find_coupling, control_state, find_first_difference
    controls: Sequence[Callable[[Trial, Record], Record]] = (control_ranks, *for_one_process, *for_all)
    with trial.runner.limit.searching():
        if record.divergent is not None and record.divergent.differs_after_passes:
            record = _run_controls(trial, record, (find_first_difference,))
            # what changes equal gradients is all that differs
            controls = () if record.edit is not None else controls
        record = _run_controls(trial, record, controls)
    stopped_after = trial.runner.request.time_limit if trial.runner.limit.has_ended else None
    return replace(record, stopped_after=stopped_after, failures=dict(trial.failures))


def _run_controls(trial: Trial, record: Record, controls: Sequence[Callable[[Trial, Record], Record]]) -> Record:
    # in this order: later controls read the answers of earlier ones
    for control in controls:
        with suppress(ProblemError, TimeUp):  # a control that fails, or that has no time left, answers nothing
            record = control(trial, record)
    return record
