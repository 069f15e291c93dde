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
from typing import Any

import torch

from gaverify.audit.backward_controls import batch_dependent_backward
from gaverify.audit.coupling_controls import coupled
from gaverify.audit.judgement import working_unit
from gaverify.audit.outcome import is_explained
from gaverify.audit.rank_facts import left_by, rank_facts, weighed_run
from gaverify.audit.ranks import RankedRun
from gaverify.audit.reading import Run
from gaverify.audit.running import Trial
from gaverify.audit.stages import compare_changes, fit_gradients, fitted_terms
from gaverify.audit.state_controls import restored
from gaverify.audit.transform_controls import find_transformed_gradients
from gaverify.collective.facts import with_shares
from gaverify.errors import ProblemError
from gaverify.records.audit import Overwritten, Record, UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.facts import facts_of_loop
from gaverify.records.stages import Stage, StageComparison
from gaverify.records.windows import common_rounds, rounds_of, windows_of
from gaverify.rules.calls import clipped_inside
from gaverify.rules.scale import fitted_weights_of, multipliers_of
from gaverify.thresholds import FIT_FLOAT32, MANY_UNITS, SMALLEST_FAULT, TENTH, TOO_SMALL_TO_CLIP
from gaverify.verdict.criteria import floors_allowed

_OTHERWISE = ((1, 1.3), (2, 1.7), (3, 2.9))  # directions of weights, and what losses are multiplied by
_MOST_HELD = 64  # micro-batches that the control with undone steps runs at most


def floored(trial: Trial, record: Record) -> Record:
    """The control for differences near the noise floor: a floor that one run measured may be small by chance.

    A gradient whose terms cancel is made of the rounding of each of them, which moved weights hardly change where they
    are small. So the losses are multiplied by odd factors, which rounds every term otherwise, and the weights are moved
    in more directions; the largest floor counts.
    """
    rows = [row for update in record.updates if update.differs for row in update.parameters]
    apart = [row.relative_difference for row in rows if row.outcome is Outcome.DIVERGENT]
    if not apart or not all(difference < SMALLEST_FAULT for difference in apart):
        return record
    again = trial.runner.runs(*(trial.moved(coins=coins, shrink=factor) for coins, factor in _OTHERWISE))
    factors = [factor for _, factor in _OTHERWISE]
    return replace(record, updates=trial.compared(again=[*zip(again, factors, strict=True)]))


def unclipped(trial: Trial, record: Record) -> Record:
    """The control for clipping inside windows, and for gradients that a script changes by hand.

    All runs again, with losses too small to be clipped.

    Dividing, centralising or summing elsewhere treats a gradient alike whatever its size; clipping lets a small one
    pass. So what the optimizers see of small gradients is what the script makes of them before it clips.
    """
    if not any(update.unclear for update in record.updates) and not clipped_inside(facts_of_loop(record)):
        return record
    control = trial.changed(shrink=TOO_SMALL_TO_CLIP, shown_as="unclipped")
    small = tuple(replace(update, decided=Stage.UNCLIPPED) for update in control.compared(unclipped=True))
    windows = windows_of(control.accumulated.events, control.numbers)
    found = weighed(control, replace(record, updates=small, windows=windows))
    record = replace(record, weighed=found.weighed, made=found.made)
    known = {update.number: update for update in small if update.judged}
    updates = tuple(
        _without_clips(update, known[update.number]) if update.unclear and update.number in known else update
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


def by_terms(trial: Trial, record: Record) -> Record:
    """The control for a loss that is a sum: both runs up to the update that differs, with each term alone.

    Nothing is told unless the terms' gradients add up to those of the whole, in both runs. Behind the first update the
    full batch's steps are led as well: its term alone would train other weights.
    """
    update = record.divergent
    if update is None or is_explained(record):
        return record
    windows = [window for window in (*record.full_windows, *record.windows) if window.number == update.number]
    counts = {event.values.get("terms", 0) for window in windows for event in window.of("backward")}
    count = counts.pop() if len(windows) == 2 and len(counts) == 1 else 0  # else the runs have other numbers of them
    if count < 2:
        return record
    alone = []
    for term in range(1, count + 1):
        change: dict[str, Any] = {"term": term, "shown_as": "terms", "updates": update.number}
        whole = trial.jobs("full" if update.number == 1 else "perturbed", **change)
        full, accumulated = trial.runner.runs(whole, trial.jobs("accumulated", **change))
        alone.append((full, accumulated))
    found = fitted_terms((trial.full, trial.accumulated), alone, record.tolerance, update.number)
    return replace(record, terms=found)


def overwritten(trial: Trial, record: Record) -> Record:
    """The control for gradients that each backward pass may set: the accumulated run, cleared before each of them.

    Where the same gradient reaches the step, those before the last pass never did. What such passes add is that of the
    next one less their own, so that weights which fall from pass to pass give the full batch's gradient.
    """
    found = fitted_weights_of(record)
    if found is None or len(found[1].multipliers) < 2 or any(a <= b for a, b in pairwise((*found[1].multipliers, 0.0))):
        return record
    number = found[0].number
    cleared = trial.again("accumulated", cleared=True, updates=number)
    left = left_by(trial.accumulated, cleared, update=number)
    if not left <= record.tolerance or not cleared.meta["cleared_gradients"]:
        return record  # a script that moves its gradients away after each pass leaves nothing to clear
    return replace(record, overwritten=Overwritten(left, *(cleared.meta["setter"] or (None, None))))


def weighed(trial: Trial, record: Record) -> Record:
    """The control for weights that fit: the accumulated run with every loss of the update times what it should count.

    A fit is arithmetic on recorded gradients. What the script makes of such losses (with its state, its hooks, its
    limits) only a run shows.
    """
    update, right = record.divergent, multipliers_of(record)
    shares = trial.shares(record, right)
    known = record.overwritten is not None or record.weighed is not None
    if update is None or not shares or known or record.ranks > 1:
        return record
    again = trial.again("accumulated", shares=shares, updates=update.number, shown_as="weights")
    passes = [event for event in again.events if event.kind == "backward" and event.update == update.number]
    made = next((event.values["made"] for event in reversed(passes) if event.values.get("made")), None)
    return replace(record, weighed=weighed_run(trial.full, again, record), made=(made[0], made[1]) if made else None)


def with_steps_undone(trial: Trial, record: Record) -> Record:
    """The control for a step inside the window: once more with every step undone, then fit all micro-batches."""
    first = record.first
    steps = record.expected(first) if first is not None else None
    if first is None or steps is None or not 0 < first.backwards < steps <= _MOST_HELD:
        return record
    held = trial.again("frozen", updates=steps)
    samples = [held.samples(round_) for round_ in rounds_of(held.events)[:steps]]
    # of a step inside the backward pass, which may clear what it has used, only what it was given was seen
    seen = [any(bool(change.any()) for added in sample.increments for change in added.values()) for sample in samples]
    given = [sample.increments if any_ else [sample.of("final")] for sample, any_ in zip(samples, seen, strict=True)]
    increments = [increment for members in given for increment in members][:steps]
    whole = trial.full.samples(rounds_of(trial.full.events)[0])
    totals = {at: sum(step[at] for step in increments if at in step) for at in whole.summed}
    used = {at: total for at, total in totals.items() if isinstance(total, torch.Tensor)}
    if len(used) < len(totals):
        return record  # a step inside the backward left no gradient to be seen
    target, stretches = whole.summed, whole.of("stretches")
    fit = fit_gradients(target, stretches, used, increments)
    if fit is not None and whole.by_change:
        # What the script takes away from its weights is the gradient times a rate that is not known.
        target = {at: part * fit.factor for at, part in target.items()}
        fit = fit_gradients(target, stretches, used, increments)
    return replace(record, steps_undone=fit)


def on_its_own(trial: Trial, record: Record) -> Record:
    """The control for a step that makes something else of the same gradient: with the script's own gradients.

    Updates whose weights change alike then have no fault. Their gradients differ by a factor that the step takes out
    again: a step that divides by K, a lower rate.
    """
    if trial.options.get("by_hand") or not any(update.other_step for update in record.updates):
        return record
    full, own = trial.full, trial.again("accumulated", lead=False)
    settled = tuple(_settled(update, full, own) for update in trial.compared(own))
    pairs = zip(record.updates, settled, strict=False)
    found = any(after.step_takes_factor and before.other_step for before, after in pairs)
    return replace(record, updates=settled) if found else record


def by_change(trial: Trial, record: Record) -> Record:
    """The control for a script that moves its weights itself: the full batch again, with losses half as large.

    Weights that change otherwise for half the gradient (SGD) show what the script makes of `.grad` in its step, and of
    sums that it keeps elsewhere. Those that do not (Adam, a sign, a norm) show nothing of its size. Nor is it asked
    for where their change tells what the gradients do, or agrees where it alone was seen.
    """
    if not trial.options.get("by_hand"):
        return record
    full, accumulated = trial.full, trial.accumulated
    if not any(_needs_half(update, full, accumulated) for update in record.updates):
        return record
    half = trial.again("full", shrink=0.5, shown_as="unclipped")
    return replace(record, updates=decide_by_change(record.updates, full, accumulated, half))


def decide_by_change(
    updates: tuple[UpdateComparison, ...], full: Run, accumulated: Run, half: Run
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
    found = []
    for update in updates:
        change = _change(update, full, accumulated)
        if update.decided is Stage.CHANGE or change is None:
            found.append(update)
        elif update.outcome is Outcome.EQUIVALENT and change.outcome is Outcome.DIVERGENT:
            found.append(replace(update, stages=(*update.stages, change)))
        else:
            found.append(_settled(update, full, accumulated))
    return tuple(found)


def _needs_half(update: UpdateComparison, full: Run, accumulated: Run) -> bool:
    if update.decided is Stage.CHANGE:
        return update.differs
    change = _change(update, full, accumulated)
    return change is not None and change.outcome is not update.outcome


def _change(update: UpdateComparison, full: Run, own: Run, left: float = 0.0) -> StageComparison | None:
    """How far the weights change otherwise in an update, but for what a factor leaves; None where it is not judged."""
    if not update.judged:
        return None
    unit, round_ = working_unit(full), common_rounds(full.events, own.events)[update.number - 1]
    noise = max(MANY_UNITS * unit, floors_allowed(unit) * update.noise) + left
    return compare_changes(full.samples(round_), own.samples(round_), unit, noise)


def _settled(update: UpdateComparison, full: Run, own: Run) -> UpdateComparison:
    """Returns an update, as equivalent where its gradient differs by a factor and its weights change alike."""
    left = update.fit.factor_residual if update.fit is not None else math.inf
    if update.outcome is not Outcome.DIVERGENT or not left < FIT_FLOAT32:
        return update
    change = _change(update, full, own, left)
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


def controlled_ranks(trial: Trial, record: Record) -> Record:
    """Returns the record with the controls that its ranks call for."""
    ranks = record.together
    if ranks is None:
        return record

    # What a script reduces by hand is right or wrong where the optimizers see it.
    stages = record.updates[0].stages if record.updates else ()
    at_the_step = any(stage.stage is Stage.USED and stage.outcome is Outcome.DIVERGENT for stage in stages)

    def left(*, also_full: bool = False, **change: Any) -> float:
        """What a changed run of the ranks leaves, against the full-batch run, or against that with the same change."""
        try:
            full = trial.again("full", shown_as="ranks", **change) if also_full else trial.full
            accumulated = trial.again("accumulated", source=full, shown_as="ranks", **change)
        except ProblemError:
            return math.nan
        return left_by(full, accumulated, summed=not at_the_step)

    if ranks.stepped_without:
        ranks = replace(ranks, sync_control=left(also_full=True, synchronise=True))
    elif ranks.at_fault and (ranks.apart > ranks.rounding or ranks.ends_unreduced):
        ranks = replace(ranks, sync_control=left(synchronise=True))
    elif ranks.at_fault and ranks.buffers_apart:
        ranks = replace(ranks, frozen_control=left(also_full=True, frozen=ranks.buffers_apart))
    elif ranks.at_fault and ranks.gathers and not ranks.shares_to_try:
        ranks = replace(ranks, gather_control=left(gathers=True))
    elif ranks.at_fault:
        ranks = with_shares(ranks, lambda shares: left(shares=shares))
    return replace(record, together=ranks)


def controlled(trial: Trial, record: Record, *, ranked: bool) -> Record:
    """Returns the record with what further runs show, where it calls for them; one that fails shows nothing.

    Args:
        trial: The runs that were compared.
        record: What they show.
        ranked: The accumulated run trains in several processes.
    """
    of_weights = with_steps_undone, overwritten, weighed, find_transformed_gradients, batch_dependent_backward
    alone = () if ranked else (*of_weights, by_terms)
    together = floored, with_rank_facts, unclipped, by_change, on_its_own, controlled_ranks
    for control in (*together, *alone, coupled, restored):
        with suppress(ProblemError):
            record = control(trial, record)
    return record
