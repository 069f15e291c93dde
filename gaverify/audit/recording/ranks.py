"""What one of several ranks does on its own: its gradients before they are reduced, and when it leaves.

Shapes: S sampled elements of an optimizer's gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gaverify.audit.recording.values import Sample, plain
from gaverify.passes.wrappers import is_sharded, offset_of_shard

_PATIENCE = 20.0  # seconds that a rank waits for the others before it ends; one of them may have failed
_LEFT = "left-{}"


class OwnGradients:
    """Sums what each backward pass of this process alone gives, at the sampled elements of every optimizer.

    A leaf's hook sees the gradient before DDP reduces it. FSDP2's sharded parameters have no such moment: nothing is
    known of them here.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[torch.Tensor]] = {}
        self._sharded: set[int] = set()
        self._hooked: set[tuple[int, int]] = set()  # a parameter may be several optimizers'

    def listen(self, index: int, sample: Sample) -> None:
        """Listens to the parameters of an optimizer that are not listened to yet."""
        if index in self._parts and len(self._parts[index]) == len(sample.parameters):
            return
        self._parts[index] = [torch.zeros(size, dtype=torch.float64, device="cpu") for size in sample.sizes]
        for at, parameter in enumerate(sample.parameters):
            if type(parameter.data) is not torch.Tensor:
                self._sharded.add(index)
            elif parameter.requires_grad and (index, id(parameter)) not in self._hooked:
                self._hooked.add((index, id(parameter)))
                parameter.register_hook(partial(self._add, index, at, sample))

    def _add(self, index: int, at: int, sample: Sample, gradient: torch.Tensor) -> None:
        values = plain(gradient)
        if values is not None:
            self._parts[index][at] += sample.elements(at, values)

    def take(self, index: int) -> torch.Tensor | None:
        """Returns what was added since it was taken last, shape (S,); None where nothing is known."""
        parts = self._parts.get(index)
        if parts is None or index in self._sharded:
            return None
        total = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")
        self._parts[index] = [torch.zeros_like(part) for part in parts]
        return total


@contextmanager
def synchronised(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Lets the engines of these models reduce in the next backward pass, by their own public switches."""
    modules: Iterable[Any] = (module for model in models for module in model.modules())
    for module in modules:
        if hasattr(module, "set_requires_gradient_sync"):  # FSDP2
            module.set_requires_gradient_sync(True)
            module.set_requires_all_reduce(True)
            module.set_is_last_backward(True)
        elif hasattr(module, "require_backward_grad_sync"):  # DDP
            module.require_backward_grad_sync = True
    yield


@contextmanager
def frozen(buffers: Sequence[torch.Tensor], models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Runs the modules that hold any of these buffers in evaluation mode, and puts them back."""
    wanted, modules = {id(buffer) for buffer in buffers}, (module for model in models for module in model.modules())
    holding = [module for module in modules if not wanted.isdisjoint(map(id, module.buffers(recurse=False)))]
    changed = [module for module in holding if module.training]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True


def shards_of(parameters: list[torch.Tensor]) -> dict[int, tuple[int, ...]]:
    """Returns where the shard of this process begins in each sharded parameter, by position; empty where none is."""
    return {at: offset_of_shard(kept.data) for at, kept in enumerate(parameters) if is_sharded(kept.data)}


def addends_of(parameters: Sequence[torch.Tensor]) -> dict[int, int]:
    """Returns which gradients, by position, are addends of a sum still to be made, and how many ranks hold each.

    A weight that tensor parallelism keeps whole beside sharded activations has such a gradient until the step.
    """
    found = {}
    for at, parameter in enumerate(parameters):
        gradient: Any = parameter.grad
        placements = getattr(gradient, "placements", ())
        if any(placement.is_partial() for placement in placements):
            sizes = zip(placements, gradient.device_mesh.shape, strict=True)
            found[at] = math.prod(size for placement, size in sizes if placement.is_replicate())
    return found


def shards_alone(
    tensors: Mapping[str, Mapping[int, torch.Tensor]], parameters: Sequence[torch.Tensor]
) -> dict[str, dict[int, torch.Tensor]]:
    """Returns the members, by position, whose parameters are sharded: every rank holds the whole of all others."""
    sharded = {at for at, parameter in enumerate(parameters) if hasattr(parameter.data, "placements")}
    return {kind: {at: value for at, value in own.items() if at in sharded} for kind, own in tensors.items()}


def place_in_group() -> tuple[int, int]:
    """Returns this process's rank and how many train together: (0, 1) where no process group was initialised."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def local_shapes(parameters: list[torch.Tensor]) -> dict[int, tuple[int, ...]]:
    """Returns the shape of the shard of this process of each sharded parameter, by position."""
    kept: list[tuple[int, Any]] = [(at, parameter.data) for at, parameter in enumerate(parameters)]
    return {at: tuple(data.to_local().shape) for at, data in kept if is_sharded(data)}


def leave_together(meeting: Path, rank: int, ranks: int) -> None:
    """Waits until every rank is as far: who leaves first cuts the others' collectives off.

    Args:
        meeting: A folder that all ranks see.
        rank: The number of this one.
        ranks: How many there are.
    """
    (meeting / _LEFT.format(rank)).touch()
    limit = time.monotonic() + _PATIENCE
    others = [meeting / _LEFT.format(other) for other in range(ranks)]
    while time.monotonic() < limit and not all(other.exists() for other in others):
        time.sleep(0.01)
