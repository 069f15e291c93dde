"""Σ|terms| of the gradients that a backward forms as sums: their rounding grows with the terms, not with the sum.

    linear bias, broadcast addition       a sum over the dimensions that were broadcast
    bias of a normalisation, convolution  the sum of the output's gradient over everything but the channels
    embedding                             for each row, the sum over the places that looked it up

A gradient that is zero in exact arithmetic (a bias before a normalisation) is the rounding of such a sum, and nothing
else tells so in working precision. Weights of normalisations and convolutions are sums as well, but hardly ever cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

aten = torch.ops.aten
_SLICE = 1 << 20  # terms whose magnitudes are held at a time
_LARGEST_TABLE = 1 << 22  # elements of an embedding whose terms are summed; a second table of more is too much memory


class Terms(NamedTuple):
    """The 2-norm of Σ|terms| over the elements of one sum, and whether the operation was a plain sum."""

    scale: torch.Tensor
    plain: bool


class TermSums:
    """Remembers the sums of one backward by the memory that their results lie in."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, StorageWeakRef, Terms]] = {}

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Measures the terms of an operation of `SUMMING` that has just run."""
        at, magnitude = SUMMING[func]
        total = result if at is None else result[at]
        if total is None or not total.is_floating_point():
            return
        sums = magnitude(args, total)
        if sums is not None:
            terms = Terms(torch.linalg.vector_norm(sums), at is None and func is aten.sum.dim_IntList)
            # By address: autograd hands the very tensor on to `.grad` where nothing is added to it.
            self._found[total.data_ptr()] = total.numel(), StorageWeakRef(total.untyped_storage()), terms

    def of(self, gradient: torch.Tensor | None) -> Terms | None:
        """Returns the terms of a gradient that is one of the sums still: it lies in the memory that the sum was put in.

        Memory that was freed meanwhile may have been given to another gradient; the weak reference tells.
        """
        if gradient is None or gradient.layout is not torch.strided:
            return None
        numel, storage, terms = self._found.get(gradient.data_ptr(), (-1, None, None))
        return terms if numel == gradient.numel() and storage is not None and not storage.expired() else None


def _plain_sum(args: tuple[Any, ...], total: torch.Tensor) -> torch.Tensor | None:
    terms = args[0]
    # Nothing was summed: a view, or a reduction over dimensions of size 1.
    if not terms.is_floating_point() or terms.numel() <= total.numel():
        return None
    return _magnitudes(terms, [dim % terms.dim() for dim in args[1] or range(terms.dim())])


def _per_channel(at: int) -> Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor]:
    """The sum over everything but dimension 1 of the gradient that is argument `at`."""
    return lambda args, total: _magnitudes(args[at], [dim for dim in range(args[at].dim()) if dim != 1])


def _per_feature(args: tuple[Any, ...], total: torch.Tensor) -> torch.Tensor:
    return _magnitudes(args[0], list(range(args[0].dim() - total.dim())))


def _per_row(args: tuple[Any, ...], total: torch.Tensor) -> torch.Tensor | None:
    if total.numel() > _LARGEST_TABLE:
        return None
    sums: torch.Tensor = aten.embedding_dense_backward.default(args[0].abs(), *args[1:])
    return sums


def _magnitudes(terms: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Σ|terms| over `dims`, without a copy of all terms; in float32 at least, where half precision would overflow."""
    wide = torch.promote_types(terms.dtype, torch.float32)
    if not dims:
        return terms.abs()
    rows = max(1, _SLICE * terms.shape[dims[0]] // max(terms.numel(), 1))
    parts = [part.abs().sum(dims, dtype=wide) for part in terms.split(rows, dims[0])]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


SUMMING: dict[Any, tuple[int | None, Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor | None]]] = {
    aten.sum.dim_IntList: (None, _plain_sum),
    aten.native_layer_norm_backward.default: (2, _per_feature),
    aten.native_group_norm_backward.default: (2, _per_channel(0)),
    aten.native_batch_norm_backward.default: (2, _per_channel(0)),
    aten.convolution_backward.default: (2, _per_channel(0)),
    aten.embedding_dense_backward.default: (None, _per_row),
}
"""The operations that form sums: which of their results is one (None: the only one), and Σ|terms| of it."""
