"""The control for gradients that a script transforms in each micro-batch before it adds them up.

Such a script takes the gradient of a backward pass, transforms it (orthogonalises, clips, takes the sign), and assigns
the sum to `.grad` before the step. No call tells of the transformation, but the gradients that the optimizer sees do:
U(a, b) are those with the losses of the window's first half multiplied by a, and those of its second half by b.

    U(s, s) = s U(1, 1)                         the transformation is linear: micro-batches and their sum give the same
    U(s, 1) + U(1, s) = U(1, 1) + U(s, s)       each micro-batch is transformed on its own, and the results are added up
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from gaverify.audit.changes import WeightMicroBatches
from gaverify.audit.outcome import is_explained
from gaverify.audit.reading import Place, RecordedRun, Samples, labels
from gaverify.audit.running import Trial
from gaverify.audit.stages import fit_gradients
from gaverify.records.audit import Record, TransformedGradients, UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.stages import Stage
from gaverify.records.windows import common_rounds, rounds_of
from gaverify.thresholds import FIT_FLOAT32

_FACTOR = -0.5  # s: a power of two rounds nothing, and a negative one shows transformations that ignore signs

Gradients = Mapping[Place, torch.Tensor]


def find_transformed_gradients(trial: Trial, record: Record) -> Record:
    """Returns the record with the parameters whose gradients are transformed in each micro-batch, if any are.

    The control is needed if the optimizer sees no weighted sum of the backward passes' gradients, or if the right
    weights leave a difference. The gradients of the passes have to add up to the full batch's: else the fault lies
    before the transformation.
    """
    update = record.divergent
    if update is None or record.ranks > 1 or update.window.steps < 2 or not _may_be_transformed(record, update):
        return record
    round_ = common_rounds(trial.full.events, trial.accumulated.events)[update.number - 1]
    difference_of_sums = _compare_sums(trial.full.samples(round_), trial.accumulated.samples(round_))
    first_half = update.window.steps // 2
    second_half = update.window.steps - first_half
    factors = [(a,) * first_half + (b,) * second_half for a, b in ((_FACTOR, 1.0), (1.0, _FACTOR), (_FACTOR, _FACTOR))]
    shares = [trial.factors_of_passes(record, each) for each in factors]
    if not difference_of_sums <= record.tolerance or not all(shares):
        return record
    runs = trial.runner.record(
        *(
            trial.control("accumulated", WeightMicroBatches(each), updates=update.number, shown_as="transformed")
            for each in shares
        )
    )
    used = [_used_gradients(run, update) for run in (trial.accumulated, *runs)]
    transformed = compare_responses(record, update, labels(trial.full, trial.accumulated), *used)
    transformed = transformed and replace(transformed, sums_difference=difference_of_sums)
    return replace(record, controls=replace(record.controls, transformed=transformed))


def compare_responses(
    record: Record,
    update: UpdateComparison,
    names: Mapping[Place, str],
    unchanged: Gradients,
    first: Gradients,
    second: Gradients,
    both: Gradients,
) -> TransformedGradients | None:
    """Returns the differing gradients that are no linear function of the losses; None if there are none.

    Args:
        record: What the runs show.
        update: The first that differs.
        names: Of the parameters.
        unchanged: U(1, 1), the gradients that the optimizer sees.
        first: U(s, 1).
        second: U(1, s).
        both: U(s, s).
    """
    divergent = {row.name for row in update.parameters if row.outcome is Outcome.DIVERGENT}
    allowed = max(FIT_FLOAT32, record.tolerance)
    transformed: dict[str, tuple[float, float]] = {}  # ‖U(s, s)‖ / ‖U(1, 1)‖, and the difference of the halves
    for place, gradient in unchanged.items():
        if not all(place in run for run in (first, second, both)) or names.get(place) not in divergent:
            continue
        nonlinear_part = _norm(both[place] - _FACTOR * gradient)
        norms = sum(_norm(each[place]) for each in (first, second, both, unchanged))
        interaction = _norm(first[place] + second[place] - gradient - both[place]) / norms if norms else math.inf
        if nonlinear_part > allowed * _norm(gradient) and interaction <= record.tolerance:
            transformed[names[place]] = _norm(both[place]) / _norm(gradient), interaction
    if not transformed:
        return None
    responses, interactions = zip(*transformed.values(), strict=True)
    explains_all = divergent <= set(transformed)
    return TransformedGradients(tuple(transformed), abs(_FACTOR), responses, math.nan, max(interactions), explains_all)


def _may_be_transformed(record: Record, update: UpdateComparison) -> bool:
    if record.controls.weighted_run is not None and not record.controls.weighted_run.rounding:
        return True
    is_no_weighted_sum = update.window.fit is not None and update.window.fit.used_residual > record.tolerance
    return is_no_weighted_sum and not is_explained(record)


def _compare_sums(full: Samples, accumulated: Samples) -> float:
    """Returns how far the sum of the backward passes' gradients is from the full batch's, up to one factor."""
    sums = []
    for samples in (full, accumulated):
        total: dict[int, torch.Tensor] = {}
        for increment in samples.increments:
            total |= {at: change + total[at] if at in total else change for at, change in increment.items()}
        sums.append(total)
    fit = fit_gradients(sums[0], full.stretches, sums[1], accumulated.increments)
    return math.inf if fit is None else fit.factor_residual


def _used_gradients(run: RecordedRun, update: UpdateComparison) -> Gradients:
    """Returns the gradients that decided about an update: before the window's last clipping, or after it."""
    round_ = rounds_of(run.events)[update.number - 1]
    # Differences of them are taken: in bfloat16 these would be rounded by as much as is looked for.
    return {
        place: each.double() for place, each in run.gradients(round_, summed=update.decided is Stage.SUMMED).items()
    }


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient))
