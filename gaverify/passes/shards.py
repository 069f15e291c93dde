"""Tensors that lie in shards on several ranks (`DTensor`), and numbers that are those of all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

Sum = Callable[[torch.Tensor], torch.Tensor]
_SUM: ContextVar[tuple[int, Sum] | None] = ContextVar("sum over ranks", default=None)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`; asked without an import of torch's package for them, which takes long."""
    return hasattr(tensor, "placements")


def offset_of_shard(tensor: Any) -> tuple[int, ...]:
    """Returns where the shard of this process begins in the whole tensor, one index per dimension."""
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:  # torch 2.4
        from torch.distributed._tensor._utils import compute_local_shape_and_global_offset  # type: ignore
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


@contextmanager
def summed_over(ranks: int, total: Sum) -> Iterator[None]:
    """Lets squares be those of all ranks: of shards added up, of replicas their mean.

    Args:
        ranks: R.
        total: Returns the sum of a tensor over the ranks, the same bits on each.
    """
    token = _SUM.set((ranks, total))
    try:
        yield
    finally:
        _SUM.reset(token)


def over_ranks() -> tuple[int, Sum] | None:
    """Returns how many ranks hold the gradients, and what adds their numbers up; None in one process."""
    return _SUM.get()


def local(tensor: Any) -> torch.Tensor:
    """Returns what this process holds of a tensor: its shard, or all of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def share_of(tensor: Any, ranks: int) -> float:
    """Returns what a square of this process's part counts: one over the ranks that hold the same part."""
    if not is_sharded(tensor):
        return 1.0 / ranks
    parts = 1
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        parts *= size if placement.is_shard() else 1
    return parts / ranks


def shard_number(tensor: Any) -> int:
    """Returns the number of this process's shard among those of a tensor; 0 where it holds all of it."""
    number = 0
    if is_sharded(tensor):
        for at, placement in enumerate(tensor.placements):
            if placement.is_shard():
                number = number * tensor.device_mesh.size(at) + tensor.device_mesh.get_local_rank(at)
    return number
