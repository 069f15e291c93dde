"""Fingerprints: a few numbers that agree to rounding where rows do, and digests, which agree where all bits do.

Shapes: a tensor of shape (*rows, C) holds rows of C numbers.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from gaverify.passes.nesting import is_array

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_PERIOD = 1 << 16  # numbers of a row after which the directions start again, with another weight
_GOLDEN = 0.6180339887  # its multiples modulo 1 never repeat


def real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor without a graph, complex ones as pairs of numbers.

    The pairs lie in a last dimension twice as long; where that dimension would be the rows', in one of their own.
    """
    values = tensor.detach()
    if not values.is_complex():
        return values
    pairs = torch.view_as_real(values.resolve_conj())
    return pairs.flatten(-2) if pairs.dim() > 2 else pairs


def project_rows(values: torch.Tensor, count: int = 2) -> torch.Tensor:
    """Returns the projections of every row onto `count` fixed directions, 1 or 2, in the precision of `values`.

    The directions are cos(j²) and sin(j²): they follow no pattern that a layer would produce. A plain sum would not do:
    it is 0 for every row behind a LayerNorm, and 1 behind a softmax.

    Args:
        values: Floating-point numbers of shape (*rows, C).
        count: How many projections.

    Shapes: (*rows, count).
    """
    length = values.shape[-1]
    directions = _directions(min(_PERIOD, length), values.device, values.dtype)[:, :count]
    if length <= _PERIOD:
        return torch.matmul(values, directions)
    total = values.new_zeros(*values.shape[:-1], count)
    for number, piece in enumerate(values.split(_PERIOD, dim=-1)):
        weight = 1.0 + _GOLDEN * number % 1.0
        total += torch.matmul(piece, directions[: piece.shape[-1]]) * weight
    return total


def summaries(rows: torch.Tensor) -> torch.Tensor:
    """Returns two projections and the norm of every row, of shape (*rows, 3)."""
    return torch.cat([project_rows(rows), torch.linalg.vector_norm(rows, dim=-1, keepdim=True)], dim=-1)


def digest_of(named: Iterator[tuple[str, Any]] | Mapping[str, torch.Tensor | None]) -> str:
    """Returns a digest of tensors, arrays and plain values with their names; what else there is counts by its name."""
    digest = hashlib.sha256()
    for name, value in named.items() if isinstance(named, Mapping) else named:
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            _update(digest, value)
        elif value is not None and is_array(value):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode() + value.tobytes())
        elif isinstance(value, _PLAIN):
            digest.update(repr(value).encode())
    return digest.hexdigest()


def _update(digest: Any, tensor: torch.Tensor) -> None:
    """Takes the tensor's own memory on the host, without a copy where it lies there, and without NumPy."""
    dense = tensor.detach()
    if dense.is_nested:
        dense = dense.values()
    dense = (dense.to_dense() if dense.layout is not torch.strided else dense).cpu().contiguous()
    if dense.numel():
        digest.update((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))


@lru_cache(maxsize=32)
def _directions(length: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The two directions as columns; made on the device, so that nothing waits for a copy."""
    angles = torch.arange(1, length + 1, dtype=dtype, device=device).square_()
    return torch.stack([torch.cos(angles), torch.sin(angles)], dim=1)
