"""Which micro-batch weights would have given the full-batch gradient?

Shapes: K micro-batches; sketches of length S = 4096 stand for the gradients, so no more than one is ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gaverify.gradients import PassProbe, PassResult, Task, accumulated_gradients
from gaverify.isolation import ModelState
from gaverify.measurements import WeightFit
from gaverify.probes.fingerprints import sketch
from gaverify.randomness import DrawRecord

_SINGULAR = 1e-10  # relative singular value below which micro-batch gradients cannot be told apart


@dataclass
class Sketches:
    """One accumulated run in sketches: g_k as `columns` (S, K), g_full as `target` (S,), the weights that were used."""

    columns: torch.Tensor
    target: torch.Tensor
    used: torch.Tensor
    elements: int


def sketched(
    task: Task, state: ModelState, record: DrawRecord, full: PassResult, *, lift: bool, probe: PassProbe | None = None,
    release: bool = False,
) -> tuple[Sketches, PassResult]:  # fmt: skip
    """Accumulates once more and sketches every micro-batch's gradient on the way.

    The gradients accumulate in `.grad`; the sketch is linear, so the difference of two sketches is the sketch of one
    micro-batch's share. `release` frees the full batch's gradients once they are sketched.
    """
    elements = sum(gradient.numel() for gradient in full.gradients.values() if gradient is not None)
    target = sketch(list(full.gradients.values()))
    if release:
        full.gradients = dict.fromkeys(full.gradients)
    sums: list[torch.Tensor] = []

    def note(_: int) -> None:
        sums.append(sketch([parameter.grad for parameter in task.parameters.values()]))

    task = replace(task, strategy="accumulate")  # one backward over the sum would not tell the shares apart
    accumulated = accumulated_gradients(task, state, record, full, lift=lift, after_backward=note, probe=probe)
    steps = torch.stack([sums[0], *(b - a for a, b in pairwise(sums))], dim=1)
    weights = torch.tensor(accumulated.weights, dtype=steps.dtype, device=steps.device)
    columns = steps / torch.where(weights == 0, torch.ones_like(weights), weights)
    return Sketches(columns, target, weights, elements), accumulated


def fitted(runs: Sequence[Sketches]) -> WeightFit:
    """Returns the least-squares weights that explain all runs at once; each run counts relative to its own gradient.

        min ‖g_full − Σ c_k g_k‖

    Where c is not unique, the one nearest to the weights that were used is returned.
    """
    norms = [torch.linalg.vector_norm(run.target).clamp_min(1e-300) for run in runs]
    columns = torch.cat([run.columns / norm for run, norm in zip(runs, norms, strict=True)])
    target = torch.cat([run.target / norm for run, norm in zip(runs, norms, strict=True)])
    weights = runs[0].used
    left = target - columns @ weights
    # The singular values tell which combinations of micro-batches the gradients can distinguish at all.
    u, s, vh = torch.linalg.svd(columns, full_matrices=False)
    kept = s > s.max() * _SINGULAR
    best = weights + vh[kept].T @ ((u[:, kept].T @ left) / s[kept])
    residual = torch.linalg.vector_norm(target - columns @ best) / torch.linalg.vector_norm(target).clamp_min(1e-300)
    shares = runs[0].columns / norms[0] * best
    count = len(weights)
    spread = torch.linalg.vector_norm(shares - shares.mean(1, keepdim=True)).square()
    noise = (spread * count / max(count - 1, 1)).sqrt()
    equations = sum(run.elements for run in runs)
    return WeightFit(
        tuple(best.tolist()), float(residual), bool(kept.all()), float(noise), vacuous=equations <= int(kept.sum())
    )
