"""The control for gradients that a script transforms in each micro-batch before it adds them up.

Such a script takes what a backward pass gave, makes something else of it (orthogonalises, clips, takes the sign), and
puts the sum in place before the step. No call tells of the transformation, but the gradients that the optimizer sees
show it: let every loss of the window count s times, those of its first half alone, or those of its second.

    U(s, s) = s U(1, 1)                         linear: it is no matter whether the micro-batches or the sum are given
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

_TIMES = -0.5  # a power of two rounds nothing; its sign shows what treats a gradient and its negative otherwise

Gradients = Mapping[Place, torch.Tensor]


def find_transformed_gradients(trial: Trial, record: Record) -> Record:
    """Returns the record with the parameters whose gradients each micro-batch transforms, where that is what differs.

    Looked for where the optimizer sees no weighted sum of what the backward passes give, or where right weights leave
    a difference, as what is clipped again does. The passes themselves have to add up to the full batch's gradient.
    """
    update = record.divergent
    if update is None or record.ranks > 1 or update.backwards < 2 or not _may_be_transformed(record, update):
        return record
    round_ = common_rounds(trial.full.events, trial.accumulated.events)[update.number - 1]
    sums_apart = _difference_of_sums(trial.full.samples(round_), trial.accumulated.samples(round_))
    first, rest = update.backwards // 2, update.backwards - update.backwards // 2
    counts = [(a,) * first + (b,) * rest for a, b in ((_TIMES, 1.0), (1.0, _TIMES), (_TIMES, _TIMES))]
    shares = [trial.shares(record, each) for each in counts]
    if not sums_apart <= record.tolerance or not all(shares):
        return record
    runs = trial.runner.record(
        *(
            trial.control("accumulated", WeightMicroBatches(each), updates=update.number, shown_as="transformed")
            for each in shares
        )
    )
    used = [_used(run, update) for run in (trial.accumulated, *runs)]
    transformed = compare_responses(record, update, labels(trial.full, trial.accumulated), *used)
    return replace(record, transformed=transformed and replace(transformed, sums_apart=sums_apart))


def compare_responses(
    record: Record,
    update: UpdateComparison,
    names: Mapping[Place, str],
    as_it_is: Gradients,
    first: Gradients,
    second: Gradients,
    both: Gradients,
) -> TransformedGradients | None:
    """Returns the differing gradients that do not follow their losses, and whose micro-batches are transformed alone.

    Args:
        record: What the runs show.
        update: The first that differs.
        names: Of the parameters.
        as_it_is: What the optimizer sees of the script's losses.
        first: The same where those of the window's first half count otherwise.
        second: Those of the second half.
        both: All of them.
    """
    divergent = {row.name for row in update.parameters if row.outcome is Outcome.DIVERGENT}
    allowed = max(FIT_FLOAT32, record.tolerance)
    found: dict[str, tuple[float, float]] = {}
    for place, gradient in as_it_is.items():
        if not all(place in run for run in (first, second, both)) or names.get(place) not in divergent:
            continue
        left = _size(both[place] - _TIMES * gradient)
        sizes = sum(_size(each[place]) for each in (first, second, both, as_it_is))
        halves_apart = _size(first[place] + second[place] - gradient - both[place]) / sizes if sizes else math.inf
        if left > allowed * _size(gradient) and halves_apart <= record.tolerance:
            found[names[place]] = _size(both[place]) / _size(gradient), halves_apart
    if not found:
        return None
    responses, apart = zip(*found.values(), strict=True)
    return TransformedGradients(tuple(found), abs(_TIMES), responses, math.nan, max(apart), divergent <= set(found))


def _may_be_transformed(record: Record, update: UpdateComparison) -> bool:
    if record.weighed is not None and not record.weighed.rounding:
        return True
    unlike_passes = update.fit is not None and update.fit.used_residual > record.tolerance
    return unlike_passes and not is_explained(record)


def _difference_of_sums(full: Samples, accumulated: Samples) -> float:
    """How far the sum of what the backward passes gave is from the full batch's, but for one factor."""
    sums = []
    for samples in (full, accumulated):
        total: dict[int, torch.Tensor] = {}
        for increment in samples.increments:
            total |= {at: change + total[at] if at in total else change for at, change in increment.items()}
        sums.append(total)
    fit = fit_gradients(sums[0], full.of("stretches"), sums[1], accumulated.increments)
    return math.inf if fit is None else fit.factor_residual


def _used(run: RecordedRun, update: UpdateComparison) -> Gradients:
    """The gradients of an update that decided: before a clipping at the end of the window, where that counts."""
    round_ = rounds_of(run.events)[update.number - 1]
    return {
        place: each.double() for place, each in run.gradients(round_, summed=update.decided is Stage.SUMMED).items()
    }


def _size(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient))
