"""Controls that decide by the weights: what the steps, or a script that moves them itself, make of the gradients."""

from __future__ import annotations

import math
from dataclasses import replace

from gaverify.audit.judgement import working_unit
from gaverify.audit.reading import Run
from gaverify.audit.running import Trial
from gaverify.audit.stages import compare_changes
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.stages import Stage, StageComparison
from gaverify.records.windows import Round, common_rounds
from gaverify.thresholds import FIT_FLOAT32, MANY_UNITS, TENTH
from gaverify.verdict.criteria import floors_allowed


def on_its_own(trial: Trial, record: Record) -> Record:
    """The control for a step that makes something else of the same gradient: with the script's own gradients.

    Updates whose weights change alike then have no fault. Their gradients differ by a factor that the step takes out
    again: a step that divides by K, a lower rate.
    """
    if trial.options.get("by_hand") or not any(update.other_step for update in record.updates):
        return record
    full, own = trial.full, trial.again("accumulated", lead=False)
    rounds = common_rounds(full.events, own.events)
    settled = tuple(_settled(update, full, own, rounds[update.number - 1]) for update in trial.compared(own))
    pairs = zip(record.updates, settled, strict=False)
    found = any(after.step_takes_factor and before.other_step for before, after in pairs)
    return replace(record, updates=settled) if found else record


def by_change(trial: Trial, record: Record) -> Record:
    """The control for a script that moves its weights itself: the full batch again, with losses half as large.

    Weights that change otherwise for half the gradient (SGD) show what the script makes of `.grad` in its step, and of
    sums that it keeps elsewhere. Those that do not (Adam, a sign, a norm) show nothing of its size. Nor is it asked
    for where their change tells what the gradients do.
    """
    if not trial.options.get("by_hand"):
        return record
    full, accumulated = trial.full, trial.accumulated
    changes = _changes(record.updates, full, accumulated)
    if not any(
        update.decided is Stage.CHANGE or changes[update.number].outcome is not update.outcome
        for update in record.updates
        if update.number in changes
    ):
        return record
    half = trial.again("full", shrink=0.5, part="unclipped")
    return replace(record, updates=decided_by_change(record.updates, full, accumulated, half))


def decided_by_change(
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
            replace(update, outcome=Outcome.INCONCLUSIVE, unclear=True) if update.decided is Stage.CHANGE else update
            for update in updates
        )
    changes = _changes(updates, full, accumulated)
    rounds = common_rounds(full.events, accumulated.events)
    found = []
    for update in updates:
        change = changes.get(update.number)
        if update.decided is Stage.CHANGE or change is None:
            found.append(update)
        elif update.outcome is Outcome.EQUIVALENT and change.outcome is Outcome.DIVERGENT:
            found.append(replace(update, stages=(*update.stages, change)))
        else:
            found.append(_settled(update, full, accumulated, rounds[update.number - 1]))
    return tuple(found)


def _changes(updates: tuple[UpdateComparison, ...], full: Run, accumulated: Run) -> dict[int, StageComparison]:
    """How far the weights change otherwise in each update that is judged, by its number."""
    rounds, unit = common_rounds(full.events, accumulated.events), working_unit(full)
    found = {}
    for update in updates:
        if update.judged:
            round_ = rounds[update.number - 1]
            noise = max(MANY_UNITS * unit, floors_allowed(unit) * update.noise)
            change = compare_changes(full.samples(round_), accumulated.samples(round_), unit, noise)
            if change is not None:
                found[update.number] = change
    return found


def _settled(update: UpdateComparison, full: Run, own: Run, round_: Round) -> UpdateComparison:
    left = update.fit.factor_residual if update.fit is not None else math.inf
    if not update.judged or update.outcome is not Outcome.DIVERGENT or not left < FIT_FLOAT32:
        return update
    unit = working_unit(full)
    noise = max(MANY_UNITS * unit, floors_allowed(unit) * update.noise) + left
    change = compare_changes(full.samples(round_), own.samples(round_), unit, noise)
    if change is None or change.outcome is not Outcome.EQUIVALENT:
        return update
    stages = (*update.stages, change)
    return replace(update, outcome=Outcome.EQUIVALENT, step_takes_factor=True, stages=stages)
