"""Decides again, by what a control showed, the updates that the comparison alone left open or could not read."""

from __future__ import annotations

import math
from dataclasses import replace

from gaverify.audit.judgement import compare_updates, working_unit
from gaverify.audit.reading import Run
from gaverify.audit.stages import compare_changes
from gaverify.records.audit import UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.stages import Stage, StageComparison
from gaverify.records.windows import Round, common_rounds
from gaverify.thresholds import FIT_FLOAT32, MANY_UNITS, TENTH
from gaverify.verdict.criteria import floors_allowed


def decided_without_clips(
    updates: tuple[UpdateComparison, ...], control: tuple[UpdateComparison, ...]
) -> tuple[UpdateComparison, ...]:
    """Returns the updates; those that gradients changed by hand left unclear are decided as in the control.

    Args:
        updates: The comparisons of the runs as they are.
        control: Of the same runs with losses so small that nothing is clipped.
    """
    small = {update.number: update for update in control if update.judged}
    return tuple(
        _without_clips(update, small[update.number]) if update.unclear and update.number in small else update
        for update in updates
    )


def _without_clips(update: UpdateComparison, small: UpdateComparison) -> UpdateComparison:
    used = next((stage for stage in small.stages if stage.stage is Stage.USED), None)
    if used is None or used.outcome is Outcome.INCONCLUSIVE or small.unrepeatable:
        return update
    if used.outcome is Outcome.EQUIVALENT and update.outcome is Outcome.DIVERGENT:
        # The same sum once nothing is clipped, another where it is: clipped at another place than the full batch's.
        return replace(update, unclear=False, stages=(*update.stages, replace(used, stage=Stage.UNCLIPPED)))
    return replace(
        update,
        outcome=used.outcome,
        parameters=small.parameters,
        fit=small.fit,
        noise=small.noise,
        decided=Stage.UNCLIPPED,
        unclear=False,
        stages=(*update.stages, replace(used, stage=Stage.UNCLIPPED)),
    )


def settled_by_weights(
    updates: tuple[UpdateComparison, ...], full: Run, perturbed: Run, own: Run
) -> tuple[UpdateComparison, ...]:
    """Returns the updates; those whose weights change alike with the script's own gradients have no fault.

    Their gradients differ by a factor that the step takes out again: a step that divides by K, a lower rate.

    Args:
        updates: The comparisons with the run whose steps were led.
        full: The full-batch run.
        perturbed: The same with moved weights.
        own: The accumulated run, stepping with its own gradients.
    """
    alone = compare_updates(full, perturbed, own, len(updates))
    rounds = common_rounds(full.events, own.events)
    settled = tuple(_settled(update, full, own, rounds[update.number - 1]) for update in alone)
    found = any(after.step_takes_factor and before.other_step for before, after in zip(updates, settled, strict=False))
    return settled if found else updates


def open_to_change(updates: tuple[UpdateComparison, ...], full: Run, accumulated: Run) -> bool:
    """Whether the weights of a script that moves them itself tell something else than its gradients, or alone."""
    changes = _changes(updates, full, accumulated)
    return any(
        update.decided is Stage.CHANGE or changes[update.number].outcome is not update.outcome
        for update in updates
        if update.number in changes
    )


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
