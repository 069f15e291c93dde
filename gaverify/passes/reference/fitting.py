"""Which way the full batch is run: what was asked for, what did not fit so far, and what is left to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import nn

from gaverify.passes.isolation import ModelState
from gaverify.passes.reference.offloading import offloaded
from gaverify.passes.reference.recomputing import recomputed
from gaverify.records.comparison import Reference


@dataclass
class Fitting:
    """The way that a verification runs its full batch; all its passes share one, so that what did not fit stays out.

    Args:
        asked: What the user asked for.
        spill: Whether the full batch's gradients are put on disk.
    """

    asked: Reference = Reference.FULL
    spill: bool = False
    failed: list[Reference] = field(default_factory=list)
    states: WeakSet[ModelState] = field(default_factory=WeakSet)

    @property
    def way(self) -> Reference:
        """The way that is run now."""
        if self.asked is not Reference.AUTO:
            return self.asked
        return next(way for way in (Reference.FULL, Reference.OFFLOAD, Reference.RECOMPUTE) if way not in self.failed)

    def falls_through(self, device: torch.device) -> bool:
        """Notes that memory ran out; returns whether another way is left to try.

        On a CPU the saved activations lie in the host's memory already, so that offloading them would change nothing.
        """
        if self.asked is not Reference.AUTO or self.way is Reference.RECOMPUTE:
            return False
        self.failed.append(self.way)
        if self.way is Reference.OFFLOAD and device.type == "cpu":
            self.failed.append(Reference.OFFLOAD)
        return True

    def before_write(self, tensor: torch.Tensor) -> None:
        """Tells the blocks that will be recomputed that something is about to write to a tensor."""
        for state in list(self.states):
            state.before_write(tensor)


@contextmanager
def fitted(fitting: Fitting, modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Runs the forward and the backward inside the way that `fitting` says."""
    if fitting.way is Reference.OFFLOAD:
        with offloaded(modules, device):
            yield
    elif fitting.way is Reference.RECOMPUTE:
        with recomputed(modules, fitting.states):
            yield
    else:
        yield
