"""Decides again, by what a control showed, the updates that the comparison alone left open or could not read."""

from __future__ import annotations

import math
from dataclasses import replace

from gaverify.audit.judgement import compare_updates, working_unit
from gaverify.audit.reading import Run
from gaverify.audit.stages import compare_changes
from gaverify.records.audit import UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.stages import Stage
from gaverify.records.windows import Round, common_rounds
from gaverify.thresholds import FIT_FLOAT32, MANY_UNITS
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
