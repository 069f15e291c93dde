"""Fingerprints: short vectors that stand for tensors which are too large to keep.

Shapes: B samples; a tensor whose dimension d has B·m rows gives B numbers per direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from gaverify.passes.devices import widest
from gaverify.passes.fingerprints import real_numbers, summaries
from gaverify.passes.layout import layouts_of

_LARGE = 1e3  # from which on values count by their order of magnitude
_HUGE = 1e30  # stands for infinity
_PIECE = 1 << 15
LayoutKind = Literal["rows", "global", "matrix", "selected"]
LAYOUT_KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)


@dataclass(frozen=True)
class Layout:
    """How the samples lie in a result: found by comparing its shapes in the full batch and in a micro-batch.

    `kind`: "rows" (dimension `dim` has B·`fold` rows), "global" (the shape does not depend on the batch), "matrix"
    (several dimensions grow with the batch), "selected" (one dimension depends on which samples there are).
    """

    kind: LayoutKind
    dim: int = 0
    fold: int = 1


def layout_of(full: tuple[int, ...], micro: tuple[int, ...], batch_size: int, count: int) -> Layout | None:
    """Returns the layout of a result of shape `full` for B samples and `micro` for n < B; None where there is none."""
    changed = layouts_of(full, micro, batch_size, count)
    if changed is None:
        return None
    if not changed:
        return Layout("global")
    if len(changed) == 1:
        dim, fold = changed[0].dimension, changed[0].fold
        return Layout("rows", dim, fold) if fold else Layout("selected", dim)
    return Layout("matrix") if all(layout.fold for layout in changed) else None


def described(
    tensor: torch.Tensor, layout: Layout, *, integers: bool = False, summed: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns fingerprints and, where `summed`, moments of a tensor, which is read once for both.

    The fingerprints, of shape (variants, rows, 3), are two projections and the norm of each row, in float64. Folded
    rows (`fold` > 1) may hold the batch as their outer or as their inner index: both variants are kept.

    The moments, of shape (10,), are sums over all rows that do not depend on their order: eight moments and two scales.
    Every row counts by its two projections and its norm, in products of two and of three of these. The moments of the
    full batch are the sums of the micro-batches' exactly where all hold the same rows, in whatever order: tokens that
    are sorted by their expert. The last two entries bound the products of two and of three in magnitude.
    """
    if not _has_layout(tensor, layout):
        return None, None
    numeric = tensor.is_floating_point() or tensor.is_complex()
    if not (numeric or integers) and layout.kind != "global":
        return None, None
    values = real_numbers(tensor).to(widest(tensor.device))
    if layout.kind == "global":
        return summaries(values.reshape(1, -1)).unsqueeze(0), None
    rows = _squashed(values).movedim(layout.dim, 0)
    own = None
    if layout.kind == "selected" or layout.fold == 1:
        own = summaries(rows.reshape(rows.shape[0], -1))
        prints = own.unsqueeze(0)
    else:
        folded = rows.reshape(rows.shape[0] // layout.fold, -1)
        inner = rows.reshape(layout.fold, rows.shape[0] // layout.fold, -1).transpose(0, 1)
        prints = torch.stack([summaries(folded), summaries(inner.reshape(inner.shape[0], -1))])
    if not (summed and numeric):
        return prints, None
    return prints, _moments(own if own is not None else summaries(rows.reshape(rows.shape[0], -1)))


def _moments(rows: torch.Tensor) -> torch.Tensor:
    """The moments, of the summaries of all rows."""
    a, b, n = rows.unbind(-1)
    twice = [a * a, a * b, b * b, a * n, n * n]
    thrice = [a * a * a, a * a * b, b * b * n]
    scales = [a.square() + b.square() + n.square(), a.abs() ** 3 + b.abs() ** 3 + n**3]
    return torch.stack([*twice, *thrice, *scales]).sum(1)


def _squashed(values: torch.Tensor) -> torch.Tensor:
    """Returns v / (1 + |v| / 1000), NaN as it is: a mask of −∞ or of a type's least number hides nothing beside it.

    On a CPU piece by piece, each of which stays in the cache for all four operations.
    """
    flat = values.reshape(-1)
    result = torch.empty_like(flat)
    size = _PIECE if flat.device.type == "cpu" else max(flat.numel(), 1)
    for piece, into in zip(flat.split(size), result.split(size), strict=True):
        torch.clamp(piece, -_HUGE, _HUGE, out=into)
        into.div_(into.abs().div_(_LARGE).add_(1.0))
    return result.view(values.shape)


def _has_layout(tensor: torch.Tensor, layout: Layout) -> bool:
    """Whether the samples lie in a tensor as in the one of another micro-batch by which the layout was found."""
    if tensor.numel() == 0 or layout.kind == "matrix" or layout.dim >= max(tensor.dim(), 1):
        return False
    return layout.kind != "rows" or (tensor.dim() > 0 and tensor.shape[layout.dim] % layout.fold == 0)
