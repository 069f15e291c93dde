"""Tensors that lie in shards on several ranks (`DTensor`): where this process's part is."""

from __future__ import annotations

from typing import Any


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
