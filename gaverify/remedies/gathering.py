"""An all-gather over ranks that hands gradients back, also those that come transposed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_gather(tensor: torch.Tensor, group: Any = None) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of all ranks; the backward brings each what all losses say about its own.

    Torch's own function of this kind has moved and been renamed between its versions, and under gloo that of some loses
    gradients that are not contiguous.

    Args:
        tensor: Of the same shape on every rank.
        group: A process group; None: that of all ranks.
    """
    return _Gather.apply(tensor, group).unbind()  # type: ignore[no-any-return,no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        ctx.group = group
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
