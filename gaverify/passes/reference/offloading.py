"""Saved activations lie in the host's memory between the forward and the backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from gaverify.passes.isolation import storage

_SMALL = 1 << 14  # elements that stay where they are: a transfer costs more than it frees


@contextmanager
def offloaded(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Moves what autograd saves to the host, and back when the backward asks for it.

    What lies on a CPU is there already and is left alone. So are parameters and buffers, which stay on the device
    anyway. The transfers are hidden from gaverify's modes: a control run compares the operations of both strategies.
    """
    if device.type == "cpu":
        yield
        return
    own = {storage(tensor) for root in modules for tensor in (*root.parameters(), *root.buffers())}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device | None]:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "cpu"
        if not plain or tensor.numel() <= _SMALL or storage(tensor) in own:
            # detached: a node that saves its own output would otherwise keep itself alive
            return tensor.detach(), None
        with _disable_current_modes(), torch.no_grad():
            return tensor.to("cpu"), tensor.device

    def unpack(packed: tuple[torch.Tensor, torch.device | None]) -> torch.Tensor:
        tensor, where = packed
        if where is None:
            return tensor
        with _disable_current_modes(), torch.no_grad():
            return tensor.to(where)

    with saved_tensors_hooks(pack, unpack):
        yield
