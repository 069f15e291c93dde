"""Activations of the full batch that do not stay on the device: kept in host memory until the backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gaverify.passes.isolation import storage
from gaverify.records.comparison import Reference
from gaverify.torch_internals import no_dispatch_modes

_SMALL = 1 << 14  # elements that stay where they are: a transfer costs more than it frees


@contextmanager
def offload_saved(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Moves what autograd saves to the host, and back when the backward asks for it.

    What lies on a CPU is there already and is left alone. So are parameters and buffers, which stay on the device
    anyway. The transfers are hidden from gaverify's modes: a control run compares the operations of both strategies.
    """
    if device.type == "cpu":
        yield
        return
    weight_storages = {storage(tensor) for root in modules for tensor in (*root.parameters(), *root.buffers())}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device | None]:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "cpu"
        # A tensor subclass, or one whose memory is kept anyway, is left where it is.
        if not plain or tensor.numel() <= _SMALL or storage(tensor) in weight_storages:
            # detached: a node that saves its own output would otherwise keep itself alive
            return tensor.detach(), None
        with no_dispatch_modes(), torch.no_grad():
            return tensor.to("cpu"), tensor.device

    def unpack(packed: tuple[torch.Tensor, torch.device | None]) -> torch.Tensor:
        tensor, where = packed
        if where is None:
            return tensor
        with no_dispatch_modes(), torch.no_grad():
            return tensor.to(where)

    with saved_tensors_hooks(pack, unpack):
        yield


@dataclass
class Fitting:
    """The way that a verification runs its full batch; all its passes share one, so that what did not fit stays out.

    Args:
        asked: What the user asked for.
    """

    asked: Reference = Reference.FULL
    failed: list[Reference] = field(default_factory=list)

    @property
    def way(self) -> Reference:
        """The way that is run now."""
        if self.asked is not Reference.AUTO:
            return self.asked
        return Reference.OFFLOAD if self.failed else Reference.FULL

    def falls_through(self, device: torch.device) -> bool:
        """Notes that memory ran out; returns whether another way is left to try.

        On a CPU the saved activations lie in the host's memory already, so that offloading them would change nothing.
        """
        if self.asked is not Reference.AUTO or self.failed or device.type == "cpu":
            return False
        self.failed.append(Reference.FULL)
        return True


@contextmanager
def fit_memory(fitting: Fitting, modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Runs the forward and the backward inside the way that `fitting` says."""
    if fitting.way is Reference.OFFLOAD:
        with offload_saved(modules, device):
            yield
    else:
        yield
