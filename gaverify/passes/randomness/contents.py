"""Fingerprints of rows: they tell whose draw a row of a mask is, wherever the row lies.

Shapes: a tensor of shape (*rows, C) has a fingerprint of shape (*rows,); a vector is its own. W rows of the full
batch's draw, P of the micro-batch's.
"""

from __future__ import annotations

import torch

from gaverify.passes.fingerprints import projected, real_numbers

_PAIRS = 50_000_000  # W · P above which rows are not looked for
# How far fingerprints of one row may lie apart, relative to the largest: the rounding of what came before, in a batch
# of another size. Half-precision values agree to their 8 bits, and a few layers blur that.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
LOOSE = 0.1
"""The same where something before computes in lower precision than its result shows (autocast, casts)."""
_APART = 3.0  # under the loose tolerance: how many times farther off every other row must be than the nearest
_EQUAL = 8.0  # units in the last place within which two rows of one batch are equal: handed out in order


def fingerprint(source: torch.Tensor) -> torch.Tensor:
    """Returns one projection of every row of the last dimension."""
    values = real_numbers(source)
    values = values.to(torch.float64 if values.dtype is torch.float64 else torch.float32)
    return values if values.dim() < 2 else projected(values, 1).squeeze(-1)


def tolerance(source: torch.Tensor) -> float:
    """How far fingerprints of one row may lie apart, relative to the largest."""
    return _TOLERANCE.get(source.dtype.to_real(), LOOSE)


def differ(ours: torch.Tensor, full: torch.Tensor, least: float) -> torch.Tensor:
    """Whether two sets of fingerprints are of different rows, as a tensor: nothing waits for the device."""
    return (ours - full).abs().max() > least * full.abs().max()


def matching_rows(
    full: torch.Tensor, ours: torch.Tensor, dim: int, taken: list[torch.Tensor], least: float
) -> torch.Tensor | None:
    """Returns for each of our rows along `dim` the full batch's row of the same contents; None where one has none.

    Args:
        full: Fingerprints of the full batch's input.
        ours: Fingerprints of the micro-batch's; all other dimensions are the same.
        dim: The dimension of the rows.
        taken: Rows that other micro-batches were given: equal rows are handed out in order, each once.
        least: As `tolerance` returns it.
    """
    whole, part = _rows(full, dim), _rows(ours, dim)
    if len(whole) * len(part) > _PAIRS or len(part) > len(whole):
        return None
    scale = float(whole.abs().max())
    free = torch.ones(len(whole), dtype=torch.bool, device=whole.device)
    for rows in taken:
        free[rows] = False
    equal = _EQUAL * torch.finfo(whole.dtype).eps * scale
    found = []
    for row in part:
        at = _nearest(whole, row, free, least * scale, equal)
        if at is None:
            return None
        free[at] = False
        found.append(at)
    return torch.tensor(found, dtype=torch.int64, device=full.device)


def _nearest(whole: torch.Tensor, row: torch.Tensor, free: torch.Tensor, allowed: float, equal: float) -> int | None:
    """The first row that equals the nearest; None where none is near enough, or others are nearly as near."""
    distance = (whole - row).abs().amax(1).masked_fill(~free, torch.inf)
    at = int(distance.argmin())
    nearest = float(distance[at])
    if not nearest <= allowed:
        return None
    same = ((whole - whole[at]).abs().amax(1) <= equal) & free
    close = allowed <= max(_TOLERANCE.values()) * float(whole.abs().max())
    if not close and bool((distance[~same] < _APART * nearest).any()):
        return None
    return int(same.nonzero()[0])


def _rows(prints: torch.Tensor, dim: int) -> torch.Tensor:
    """Two numbers per row along `dim`, of shape (rows, 2)."""
    return projected(prints.movedim(dim, 0).flatten(1) if prints.dim() > 1 else prints.unsqueeze(1))
