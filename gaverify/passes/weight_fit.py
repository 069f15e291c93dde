"""Which weights of the micro-batches would have given the full-batch gradient? One least-squares fit for run and audit.

Shapes: K micro-batches; S numbers stand for each gradient (a sketch of it, or a sample of its elements).

    g_full ≈ Σ c_k g_k        the right weights c
    g_used ≈ Σ w_k g_k        the weights w that reached the optimizer
"""

from __future__ import annotations

import math

import torch

from gaverify.records.weights import WeightFit

SINGULAR_FLOAT64, SINGULAR_FLOAT32 = 1e-10, 1e-6
"""Share of the largest singular value below which a combination of micro-batch gradients is noise of the arithmetic."""


def fit_weights(
    columns: torch.Tensor,
    target: torch.Tensor,
    *,
    singular: float,
    weights: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
    equations: int | None = None,
) -> WeightFit:
    """Returns the weights c in min ‖target − columns · c‖, and how what was used stands to the target.

    Where the micro-batches leave c open, the solution nearest to the weights that were used is returned.

    Args:
        columns: g_k, shape (S, K).
        target: g_full, shape (S,), not zero.
        singular: Share of the largest singular value from which on a combination counts.
        weights: w where they are known, shape (K,); else they are fitted to `used`.
        used: g_used, shape (S,); None: columns · weights.
        equations: How many numbers the gradients really have, where that is less than S says.
    """
    if not bool(columns.isfinite().all()) or not bool(target.isfinite().all()):  # no weights explain NaN
        known = tuple(weights.tolist()) if weights is not None else (math.nan,) * columns.shape[1]
        return WeightFit(known, math.inf, determined=False, used=known, used_residual=math.inf)
    norm = torch.linalg.vector_norm(target).clamp_min(1e-300)
    used_residual = 0.0
    if used is None:
        assert weights is not None
        used = columns @ weights
    if weights is None:
        weights, used_residual, _, _ = _nearest(columns, used, None, singular)
    best, residual, determined, rank = _nearest(columns, target, weights, singular)
    factor = float(used @ target) / float(norm) ** 2
    left = float(torch.linalg.vector_norm(used - factor * target) / norm)
    return WeightFit(
        weights=tuple(best.tolist()),
        residual=residual,
        determined=determined,
        noise=gradient_noise(columns * best / norm),
        vacuous=(len(target) if equations is None else equations) <= rank,
        used=tuple(weights.tolist()),
        used_residual=used_residual,
        factor=factor,
        factor_residual=left / max(abs(factor), 1e-300),
    )


def _nearest(
    columns: torch.Tensor, target: torch.Tensor, near: torch.Tensor | None, singular: float
) -> tuple[torch.Tensor, float, bool, int]:
    """Least squares nearest to `near`, or to equal weights; with the residual, whether it is unique, and the rank."""
    count = columns.shape[1]
    norm = torch.linalg.vector_norm(target)
    if count == 0 or not bool(columns.any()) or not bool(norm):
        nothing = near if near is not None else columns.new_zeros(count)
        return nothing, 1.0 if bool(norm) else 0.0, False, 0
    u, s, vh = torch.linalg.svd(columns, full_matrices=False)
    kept = s > s.max() * singular
    if near is None:
        total = columns.sum(1)
        near = columns.new_full((count,), float(total @ target) / max(float(total @ total), 1e-300))
    left = target - columns @ near
    best = near + vh[kept].T @ ((u[:, kept].T @ left) / s[kept])
    residual = torch.linalg.vector_norm(target - columns @ best) / norm
    return best, float(residual), bool(kept.all()), int(kept.sum())


def gradient_noise(shares: torch.Tensor) -> float:
    """The standard error of Σ shares_k by the spread of its K terms, shape (S, K)."""
    count = shares.shape[1]
    if count == 0:
        return float("nan")
    spread = torch.linalg.vector_norm(shares - shares.mean(1, keepdim=True)).square()
    return float((spread * count / max(count - 1, 1)).sqrt())
