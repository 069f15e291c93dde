"""Fits every term of a loss for itself, from runs in which it alone was differentiated.

Shapes: S sampled elements of an optimizer's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gaverify.audit.fitting import fit_of
from gaverify.audit.reading import Run, Samples
from gaverify.records.rounds import common_rounds
from gaverify.records.weights import LossTerm


def fitted_terms(
    runs: tuple[Run, Run], alone: Sequence[tuple[Run, Run]], tolerance: float, update: int = 1
) -> tuple[LossTerm, ...]:
    """Returns the terms that have a gradient; none unless those of all terms add up to what both runs had.

    Args:
        runs: The full-batch and the accumulated run.
        alone: The same with one term of each loss alone, in the order of the terms.
        tolerance: What rounding leaves over, relative.
        update: The update that is looked at.
    """
    rounds = common_rounds(runs[0].events, runs[1].events)
    if len(rounds) < update:
        return ()
    round_ = rounds[update - 1]
    pairs = [tuple(run.samples(round_) for run in pair) for pair in alone]
    for at, run in enumerate(runs):
        if not add_up(run.samples(round_), [pair[at] for pair in pairs], tolerance):
            return ()
    found = []
    for number, (pair, (full, accumulated)) in enumerate(zip(alone, pairs, strict=True), 1):
        fit = fit_of(full, accumulated)
        passes = [event for event in pair[1].events if event.kind == "backward" and event.update in accumulated.updates]
        if fit is None or not passes:
            continue
        place = passes[-1].values.get("term") or (None, None)
        found.append(LossTerm(number, len(alone), fit, _feels_samples(accumulated, tolerance), *place))
    return tuple(found)


def _feels_samples(samples: Samples, tolerance: float) -> bool:
    """Whether the micro-batches, which hold other samples, have other gradients."""
    first, *others = samples.increments
    return any(
        float(torch.linalg.vector_norm(other[at] - gradient)) > tolerance * float(torch.linalg.vector_norm(gradient))
        for other in others
        for at, gradient in first.items()
        if at in other
    )


def add_up(whole: Samples, parts: Sequence[Samples], tolerance: float) -> bool:
    """Whether the gradients of the parts are together that of the whole, for every optimizer."""
    for at, gradient in whole.summed.items():
        members = [part.summed.get(at) for part in parts]
        known = [member for member in members if member is not None and len(member) == len(gradient)]
        if len(known) < len(members):
            return False
        left = torch.linalg.vector_norm(gradient - torch.stack(known).sum(0))
        scale = sum(float(torch.linalg.vector_norm(member)) for member in known)
        if not float(left) <= tolerance * scale:
            return False
    return bool(whole.steps)
