"""Which weights of the micro-batches would have given the full-batch gradient, and which were used.

Every term of a loss is fitted for itself, from runs in which it alone was differentiated.

Shapes: S sampled elements of the gradients, K backward passes of the window.

    g_full ≈ c₁ g₁ + … + c_K g_K        the right weights, on top of what the script did to each loss
    g_used ≈ u₁ g₁ + … + u_K g_K        what reached the optimizer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gaverify.audit.reading import Run, Samples
from gaverify.passes.sketches import SINGULAR_FLOAT32, fit_weights
from gaverify.records.weights import LossTerm, WeightFit
from gaverify.records.windows import common_rounds


def fit_of(full: Samples, accumulated: Samples, *, summed: bool = True, only: int | None = None) -> WeightFit | None:
    """Returns the fit over the sampled elements of all optimizers that stepped; None where there is nothing to fit.

    Args:
        full: The steps of the full-batch run.
        accumulated: Those of the accumulated run.
        summed: Of the gradients as the last backward pass left them; else as the optimizers saw them.
        only: Of this optimizer alone.
    """
    finals = [samples.summed if summed else samples.of("final") for samples in (full, accumulated)]
    if only is not None:
        finals = [{at: final for at, final in entry.items() if at == only} for entry in finals]
    return fit_gradients(finals[0], full.of("stretches"), finals[1], accumulated.increments)


def fit_gradients(
    target_of: Mapping[int, torch.Tensor],
    stretches: Mapping[int, torch.Tensor],
    used_of: Mapping[int, torch.Tensor],
    increments: list[dict[int, torch.Tensor]],
) -> WeightFit | None:
    """Returns the fit of a full-batch gradient and of a used one by what each backward pass added.

    Args:
        target_of: The full-batch gradient by optimizer, shape (S,).
        stretches: How many elements each sampled one stands for, shape (S,).
        used_of: What reached the optimizers, shape (S,).
        increments: One entry per backward pass.
    """
    optimizers = [at for at in target_of if at in used_of]
    if any(len(used_of[at]) != len(stretches[at]) for at in optimizers) or not optimizers:
        return None

    def flat(parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """All sampled elements; zeros for optimizers that a backward pass did not reach, or that took more since."""
        known = {at: parts[at] for at in parts if at in optimizers and len(parts[at]) == len(stretches[at])}
        return torch.cat([known.get(at, torch.zeros_like(stretches[at])) * stretches[at].sqrt() for at in optimizers])

    target, used = flat(target_of), flat(used_of)
    columns = torch.stack([flat(part) for part in increments], 1) if increments else target.new_zeros(len(target), 0)
    everything = torch.cat([target[None], used[None], columns.T])
    if not bool(torch.isfinite(everything).all()) or not bool(target.any()):
        return None
    return fit_weights(columns, target, used=used, singular=SINGULAR_FLOAT32)


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
        members = [part.summed[at] for part in parts if len(part.summed.get(at, ())) == len(gradient)]
        left = float((gradient - sum(members)).norm())
        if len(members) < len(parts) or not left <= tolerance * sum(float(member.norm()) for member in members):
            return False
    return bool(whole.steps)
