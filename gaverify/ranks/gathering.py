"""The control for a gather that loses the gradient: one that hands it back, in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


class _Gather(torch.autograd.Function):
    """Gathers a tensor of every rank; its gradient is the sum of what all ranks' losses say about this rank's tensor.

    Torch's own such function has moved and been renamed between the versions that gaverify runs on.
    """

    @staticmethod
    def forward(ctx: Any, gather: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        gather(parts, tensor.contiguous(), group=group)
        ctx.group = group
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return None, None, total[dist.get_rank(ctx.group)]


@contextmanager
def gathers_with_gradient() -> Iterator[None]:
    """Lets `all_gather` and `all_gather_into_tensor` hand gradients back to the ranks that the parts came from.

    What is gathered keeps its values; only the backward changes. Tensors that need no gradient are gathered as before.
    """
    plain_list, plain_tensor = dist.all_gather, dist.all_gather_into_tensor

    def gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
        with torch.enable_grad():  # the user's code may gather under `no_grad`, which is the same fault
            return _Gather.apply(plain_list, group, tensor)  # type: ignore[no-any-return,no-untyped-call]

    def into_list(parts: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or not tensor.requires_grad:
            return plain_list(parts, tensor, group, async_op)
        parts[:] = gathered(tensor, group).unbind()
        return None

    def into_tensor(output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or not tensor.requires_grad:
            return plain_tensor(output, tensor, group, async_op)
        with torch.enable_grad():
            output.copy_(gathered(tensor, group).reshape(output.shape))
        return None

    homes: tuple[Any, ...] = (dist, dist.distributed_c10d)
    try:
        for home in homes:
            home.all_gather, home.all_gather_into_tensor = into_list, into_tensor
        yield
    finally:
        for home in homes:
            home.all_gather, home.all_gather_into_tensor = plain_list, plain_tensor
