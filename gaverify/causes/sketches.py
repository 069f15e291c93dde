"""Sketches of gradients, and which micro-batch weights would have given that of the full batch.

Shapes: K micro-batches; sketches of length S = 4096 stand for the gradients, so no more than one is ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gaverify.passes.gradients import PassProbe, PassResult, accumulated_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.sketches import sketch
from gaverify.passes.task import Task
from gaverify.passes.weight_fit import SINGULAR_FLOAT64, fit_weights, gradient_noise
from gaverify.records.weights import WeightFit
from gaverify.thresholds import TINY


@dataclass
class Sketches:
    """One accumulated run in sketches: g_k as `columns` (S, K), g_full as `target` (S,), the weights that were used."""

    columns: torch.Tensor
    target: torch.Tensor
    used: torch.Tensor
    elements: int


def sketched(
    task: Task,
    state: ModelState,
    record: DrawRecord,
    full: PassResult,
    *,
    lift: bool,
    probe: PassProbe | None = None,
    release: bool = False,
    target: torch.Tensor | None = None,
) -> tuple[Sketches, PassResult]:
    """Accumulates once more and sketches every micro-batch's gradient on the way.

    The gradients accumulate in `.grad`; the sketch is linear, so the difference of two sketches is the sketch of one
    micro-batch's share. `release` frees the full batch's gradients once they are sketched; `target` is that sketch
    where there is one already.
    """
    elements = sum(gradient.numel() for gradient in full.gradients.values() if gradient is not None)
    target = sketch(list(full.gradients.values())) if target is None else target
    if release:
        full.gradients = dict.fromkeys(full.gradients)
    sums: list[torch.Tensor] = []

    def note(_: int) -> None:
        sums.append(sketch([parameter.grad for parameter in task.parameters.values()]))

    task = replace(task, strategy="accumulate")  # one backward over the sum would not tell the shares apart
    accumulated = accumulated_gradients(task, state, record, full, lift=lift, after_backward=note, probe=probe)
    return shares_of(sums, target, accumulated.weights, elements), accumulated


def shares_of(sums: Sequence[torch.Tensor], target: torch.Tensor, used: Sequence[float], elements: int) -> Sketches:
    """Returns the micro-batches' own gradients from the sketches of what had accumulated after each of them.

    Args:
        sums: One sketch per micro-batch.
        target: The sketch of the full batch's gradient.
        used: The micro-batch weights.
        elements: How many the gradient has.
    """
    if len({part.device for part in (target, *sums)}) > 1:  # some micro-batch reached the parameters of one device only
        target, sums = target.cpu().double(), [part.cpu().double() for part in sums]
    steps = torch.stack([sums[0], *(b - a for a, b in pairwise(sums))], dim=1)
    weights = torch.tensor(used, dtype=steps.dtype, device=steps.device)
    columns = steps / torch.where(weights == 0, torch.ones_like(weights), weights)
    return Sketches(columns, target, weights, elements)


def fitted(runs: Sequence[Sketches]) -> WeightFit:
    """Returns the least-squares weights that explain all runs at once; each run counts relative to its own gradient.

        min ‖g_full − Σ c_k g_k‖

    Where c is not unique, the one nearest to the weights that were used is returned.
    """
    norms = [torch.linalg.vector_norm(run.target).clamp_min(TINY) for run in runs]
    columns = torch.cat([run.columns / norm for run, norm in zip(runs, norms, strict=True)])
    target = torch.cat([run.target / norm for run, norm in zip(runs, norms, strict=True)])
    equations = sum(run.elements for run in runs)
    fit = fit_weights(columns, target, weights=runs[0].used, singular=SINGULAR_FLOAT64, equations=equations)
    shares = runs[0].columns / norms[0] * torch.tensor(fit.weights, dtype=columns.dtype, device=columns.device)
    return replace(fit, noise=gradient_noise(shares))
