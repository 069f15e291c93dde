"""Which weights of the micro-batches would have given the full-batch gradient, and which were used.

Shapes: S sampled elements of the gradients, K backward passes of the window.

    g_full ≈ c₁ g₁ + … + c_K g_K        the right weights, on top of what the script did to each loss
    g_used ≈ u₁ g₁ + … + u_K g_K        what reached the optimizer
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gaverify.audit.records import WeightFit

_RANK = 1e-6  # singular values below this share of the largest are noise of float32 gradients


def fit_weights(full: Mapping[str, Any], accumulated: Mapping[str, Any]) -> WeightFit | None:
    """Returns the fit over the sampled elements of all optimizers that stepped; None where there is nothing to fit.

    Args:
        full: The samples of an update of the full-batch run.
        accumulated: Those of the accumulated run.
    """
    optimizers = [at for at in full["final"] if at in accumulated["final"]]
    scale = [full["stretches"][at].sqrt() for at in optimizers]
    sizes = [len(part) for part in scale]
    if any(len(accumulated["final"][at]) != size for at, size in zip(optimizers, sizes, strict=True)) or not optimizers:
        return None
    target = torch.cat([full["final"][at] * s for at, s in zip(optimizers, scale, strict=True)])
    used = torch.cat([accumulated["final"][at] * s for at, s in zip(optimizers, scale, strict=True)])
    columns = _columns(accumulated["increments"], optimizers, scale)
    everything = torch.cat([target[None], used[None], columns.T])
    if not bool(torch.isfinite(everything).all()) or not bool(target.any()):
        return None
    factor = float(used @ target / (target @ target))
    left = float(torch.linalg.vector_norm(used - factor * target) / torch.linalg.vector_norm(target)) / max(
        abs(factor), 1e-300
    )
    used_weights, used_residual, _ = _solve(columns, used, None)
    right, residual, determined = _solve(columns, target, used_weights)
    return WeightFit(
        factor=factor, factor_residual=left, used=tuple(used_weights.tolist()), used_residual=used_residual,
        right=tuple(right.tolist()), residual=residual, determined=determined,
    )  # fmt: skip


def _columns(
    increments: list[Mapping[int, torch.Tensor]], optimizers: list[int], scale: list[torch.Tensor]
) -> torch.Tensor:
    """One column per backward pass that reached these optimizers, shape (S, K)."""
    columns = []
    for increment in increments:
        parts = []
        for at, stretch in zip(optimizers, scale, strict=True):
            part = increment.get(at)
            if part is None or len(part) != len(stretch):
                part = torch.zeros_like(stretch)
            parts.append(part * stretch)
        columns.append(torch.cat(parts))
    if not columns:
        return torch.zeros(sum(len(stretch) for stretch in scale), 0, dtype=torch.float64)
    return torch.stack(columns, dim=1)


def _solve(columns: torch.Tensor, target: torch.Tensor, near: torch.Tensor | None) -> tuple[torch.Tensor, float, bool]:
    """Least squares; where the columns leave it open, the solution nearest to `near`, or to equal weights."""
    count = columns.shape[1]
    norm = torch.linalg.vector_norm(target)
    if count == 0 or not bool(columns.any()) or not bool(norm):
        return torch.zeros(count, dtype=torch.float64), 1.0 if bool(norm) else 0.0, False
    u, s, vh = torch.linalg.svd(columns, full_matrices=False)
    kept = s > s.max() * _RANK
    if near is None:
        total = columns.sum(1)
        near = torch.full((count,), float(total @ target / (total @ total).clamp_min(1e-300)), dtype=torch.float64)
    left = target - columns @ near
    weights = near + vh[kept].T @ ((u[:, kept].T @ left) / s[kept])
    residual = torch.linalg.vector_norm(target - columns @ weights) / norm
    return weights, float(residual), bool(kept.all())
