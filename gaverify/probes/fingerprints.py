"""Fingerprints: short vectors that stand for tensors which are too large to keep.

Shapes: B samples; a tensor whose dimension d has B·m rows gives B numbers per direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

SKETCH = 4096
_CHUNK_ROWS = 256
_PERIOD = 1 << 16


def sketch(tensors: list[torch.Tensor | None]) -> torch.Tensor:
    """Returns a linear sketch of length 4096 of all tensors laid end to end, in float64 on their device.

    Each element is added with a random sign to the bucket of its position modulo 4096, so inner products are
    preserved in expectation and linear relations exactly. The signs depend on a tensor's place in the list, whether or
    not those before it are None: a parameter that one micro-batch leaves out changes nothing for the others.

    Source: M. Charikar, K. Chen, M. Farach-Colton, Finding frequent items in data streams, 2002 (count sketch).
    """
    present = {place: tensor for place, tensor in enumerate(tensors) if tensor is not None}
    device = next((tensor.device for tensor in present.values()), torch.device("cpu"))
    wide = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros(SKETCH, dtype=wide, device=device)
    generator = torch.Generator(device="cpu")
    for place, tensor in present.items():
        generator.manual_seed(place)
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        flat = torch.view_as_real(dense.resolve_conj()).reshape(-1) if dense.is_complex() else dense.reshape(-1)
        for start in range(0, flat.numel(), SKETCH * _CHUNK_ROWS):
            part = flat[start : start + SKETCH * _CHUNK_ROWS].to(wide)
            signs = torch.randint(0, 2, (part.numel(),), generator=generator, dtype=torch.int8).to(device) * 2 - 1
            signed = torch.nn.functional.pad(part * signs, (0, -part.numel() % SKETCH))
            total += signed.view(-1, SKETCH).sum(0)
    return total


@dataclass(frozen=True)
class Layout:
    """How the samples lie in a result: found by comparing its shapes in the full batch and in a micro-batch.

    `kind`: "rows" (dimension `dim` has B·`fold` rows), "global" (the shape does not depend on the batch), "matrix"
    (several dimensions grow with the batch), "selected" (one dimension depends on which samples there are).
    """

    kind: Literal["rows", "global", "matrix", "selected"]
    dim: int = 0
    fold: int = 1


def layout_of(full: tuple[int, ...], micro: tuple[int, ...], batch_size: int, count: int) -> Layout | None:
    """Returns the layout of a result of shape `full` for B samples and `micro` for n < B; None where there is none."""
    if len(full) != len(micro):
        return None
    changed = [dim for dim, (whole, part) in enumerate(zip(full, micro, strict=True)) if whole != part]
    if not changed:
        return Layout("global")
    scaled = [dim for dim in changed if full[dim] % batch_size == 0 and micro[dim] == full[dim] // batch_size * count]
    if len(changed) == 1:
        return Layout("rows", changed[0], full[changed[0]] // batch_size) if scaled else Layout("selected", changed[0])
    return Layout("matrix") if len(scaled) == len(changed) else None


def fingerprint(tensor: torch.Tensor, layout: Layout, *, integers: bool = False) -> torch.Tensor | None:
    """Returns fingerprints of shape (variants, rows, 3): two projections and the norm of each row, in float64.

    Folded rows (`fold` > 1) may hold the batch as their outer or as their inner index: both variants are kept.
    """
    if tensor.numel() == 0 or layout.kind == "matrix":
        return None
    values = tensor.detach()
    if not (values.is_floating_point() or values.is_complex() or integers) and layout.kind != "global":
        return None
    values = torch.view_as_real(values.resolve_conj()).flatten(-2) if values.is_complex() else values
    values = values.to(torch.float32 if values.device.type == "mps" else torch.float64)
    if layout.kind == "global":
        return _project(values.reshape(1, -1)).unsqueeze(0)
    rows = values.movedim(layout.dim, 0)
    if layout.kind == "selected" or layout.fold == 1:
        return _project(rows.reshape(rows.shape[0], -1)).unsqueeze(0)
    folded = rows.reshape(rows.shape[0] // layout.fold, -1)
    inner = rows.reshape(layout.fold, rows.shape[0] // layout.fold, -1).transpose(0, 1)
    return torch.stack([_project(folded), _project(inner.reshape(inner.shape[0], -1))])


def _project(matrix: torch.Tensor) -> torch.Tensor:
    columns = matrix.new_zeros(matrix.shape[0], 2)
    for number, piece in enumerate(matrix.split(_PERIOD, dim=1)):
        directions = _directions(min(_PERIOD, matrix.shape[1]), matrix.device, matrix.dtype)
        # the same directions again for each piece, weighted by the multiples of the golden section modulo 1
        columns += (piece @ directions[: piece.shape[1]]) * (1.0 + 0.6180339887 * number % 1.0)
    return torch.cat([columns, torch.linalg.vector_norm(matrix, dim=1, keepdim=True)], dim=1)


@lru_cache(maxsize=32)
def _directions(length: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Two directions without structure: cos(j²) and sin(j²) follow no pattern that a layer would produce."""
    angles = torch.arange(1, length + 1, dtype=dtype, device=device).square_()
    return torch.stack([torch.cos(angles), torch.sin(angles)], dim=1)
