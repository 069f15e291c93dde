"""Which way the full batch is run: what was asked for, what did not fit so far, and what is left to try.

What the activations would take in each way is told by one forward over a part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from gaverify.passes.isolation import ModelState, storage
from gaverify.passes.reference.recomputing import blocks_of, offloaded, recomputed
from gaverify.records.comparison import Reference


class _Saved:
    """Counts the bytes that autograd saves, each piece of memory once, and how many of them inside which block."""

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self.all: dict[int, int] = {}
        self.inside: list[dict[int, int]] = []
        self.inputs: dict[int, int] = {}
        self.largest = 0
        self._open = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        place = storage(tensor)
        if place and place not in self._own:
            size = tensor.untyped_storage().nbytes()
            self.all[place] = size
            self.largest = max(self.largest, size)
            if self._open:
                self.inside[-1][place] = size
        return tensor.detach()

    @contextmanager
    def block(self, arguments: Any) -> Iterator[None]:
        """Counts for one call of a block."""
        for value in tree_leaves(arguments):
            if isinstance(value, torch.Tensor) and storage(value) not in self._own:
                self.inputs[storage(value)] = value.untyped_storage().nbytes()
        self.inside.append({})
        self._open = True
        try:
            yield
        finally:
            self._open = False


def estimated_needs(modules: Sequence[nn.Module], forward: Callable[[], Any], times: float) -> dict[Reference, int]:
    """Returns the bytes of activations on the device for each way, and for `OFFLOAD` what is left there.

        full        Σ saved
        offload     twice the largest piece that is saved: it is on its way while another is used
        recompute   Σ saved outside of blocks + Σ inputs of blocks + the most that one block saves

    Args:
        modules: The model, and the loss where it is a module.
        forward: Runs the loss over a part of the batch; what it returns is held until everything is counted.
        times: How many such parts the full batch is.
    """
    saved = _Saved({storage(tensor) for root in modules for tensor in (*root.parameters(), *root.buffers())})
    with ExitStack() as stack:
        for block in blocks_of(modules):
            stack.enter_context(_counted(block, saved))
        with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            held = forward()
    in_blocks = {place for block in saved.inside for place in block}
    outside = {place: size for place, size in saved.all.items() if place not in in_blocks} | saved.inputs
    most = max((sum(block.values()) for block in saved.inside), default=0)
    del held
    parts = {
        Reference.FULL: sum(saved.all.values()),
        Reference.OFFLOAD: 2 * saved.largest,
        Reference.RECOMPUTE: sum(outside.values()) + most,
    }
    return {way: int(size * times) for way, size in parts.items()}


@contextmanager
def _counted(block: nn.Module, saved: _Saved) -> Iterator[None]:
    open_: list[Any] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        open_.append(saved.block((args, kwargs)))
        open_[-1].__enter__()

    def leave(*_: Any) -> None:
        open_.pop().__exit__(None, None, None)

    handles = [
        block.register_forward_pre_hook(enter, with_kwargs=True),
        block.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Fitting:
    """The way that a verification runs its full batch; all its passes share one, so that what did not fit stays out.

    Args:
        asked: What the user asked for.
    """

    asked: Reference = Reference.FULL
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
