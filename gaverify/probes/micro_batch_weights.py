"""Which micro-batch weights would have given the full-batch gradient?

Shapes: K micro-batches; sketches of length S = 4096 stand for the gradients, so no more than one is ever held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gaverify.gradients import PassResult, Task, accumulated_gradients
from gaverify.isolation import ModelState
from gaverify.probes.fingerprints import sketch
from gaverify.randomness import DrawRecord


@dataclass(frozen=True)
class WeightFit:
    """g_full ≈ Σ c_k g_k: the weights, what they leave over relative to ‖g_full‖, and whether c is determined."""

    weights: tuple[float, ...]
    residual: float
    determined: bool


def fit_micro_batch_weights(task: Task, state: ModelState, record: DrawRecord, full: PassResult, lift: bool) -> WeightFit:
    """Returns the least-squares weights of the micro-batch gradients.

    The gradients accumulate in `.grad`; the sketch is linear, so the difference of two sketches is the sketch of one
    micro-batch's share. Where c is not unique, the one nearest to the weights that were used is returned.
    """
    accumulated: list[torch.Tensor] = []

    def note(_: int) -> None:
        accumulated.append(sketch([parameter.grad for parameter in task.parameters.values()]))

    used = accumulated_gradients(task, state, record, full, lift=lift, after_backward=note).weights
    target = sketch(list(full.gradients.values()))
    steps = torch.stack([accumulated[0], *(b - a for a, b in zip(accumulated, accumulated[1:], strict=False))], dim=1)
    weights = torch.tensor(used, dtype=steps.dtype, device=steps.device)
    columns = steps / torch.where(weights == 0, torch.ones_like(weights), weights)
    left = target - columns @ weights
    # The singular values tell which combinations of micro-batches the gradients can distinguish at all.
    u, s, vh = torch.linalg.svd(columns, full_matrices=False)
    kept = s > s.max() * 1e-10
    correction = vh[kept].T @ ((u[:, kept].T @ left) / s[kept])
    fitted = weights + correction
    residual = torch.linalg.vector_norm(target - columns @ fitted) / torch.linalg.vector_norm(target)
    return WeightFit(tuple(fitted.tolist()), float(residual), bool(kept.all()))
