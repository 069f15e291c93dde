"""Which micro-batch weights would have given the full-batch gradient?

Shapes: K micro-batches; sketches of length S = 4096 stand for the gradients, so no more than one is ever held.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gaverify.gradients import PassProbe, PassResult, Task, accumulated_gradients
from gaverify.isolation import ModelState
from gaverify.measurements import WeightFit
from gaverify.probes.fingerprints import sketch
from gaverify.randomness import DrawRecord


def fit_micro_batch_weights(
    task: Task, state: ModelState, record: DrawRecord, full: PassResult, *, lift: bool, probe: PassProbe | None = None
) -> WeightFit:
    """Returns the least-squares weights of the micro-batch gradients.

    The gradients accumulate in `.grad`; the sketch is linear, so the difference of two sketches is the sketch of one
    micro-batch's share. Where c is not unique, the one nearest to the weights that were used is returned.
    """
    accumulated: list[torch.Tensor] = []

    def note(_: int) -> None:
        accumulated.append(sketch([parameter.grad for parameter in task.parameters.values()]))

    task = replace(task, strategy="accumulate")  # one backward over the sum would not tell the shares apart
    used = accumulated_gradients(task, state, record, full, lift=lift, after_backward=note, probe=probe).weights
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
    shares = columns * fitted
    spread = torch.linalg.vector_norm(shares - shares.mean(1, keepdim=True)).square()
    noise = (spread * task.steps / max(task.steps - 1, 1)).sqrt() / torch.linalg.vector_norm(target)
    elements = sum(gradient.numel() for gradient in full.gradients.values() if gradient is not None)
    return WeightFit(
        tuple(fitted.tolist()), float(residual), bool(kept.all()), float(noise), vacuous=elements <= int(kept.sum())
    )
