"""Counts the collectives of `torch.distributed` that run in this process, and the bytes of their tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from gaverify.passes.calls import OperationMode
from gaverify.records.ranks import Collective, Traffic

_KINDS = (  # of the names that the operators have in the namespaces c10d and _c10d_functional
    ("reduce_scatter", Collective.SCATTER),
    ("allreduce", Collective.REDUCE),
    ("all_reduce", Collective.REDUCE),
    ("allgather", Collective.GATHER),
    ("all_gather", Collective.GATHER),
    ("broadcast", Collective.BROADCAST),
)
_NAMESPACES = ("c10d", "_c10d_functional")
_WAITING = ("wait_tensor", "barrier", "monitored_barrier_")


class TrafficMeter:
    """Counts every collective while `counting()` is open; `traffic` is what was seen so far."""

    def __init__(self) -> None:
        self._counts: Counter[Collective] = Counter()
        self.sizes: Counter[Collective] = Counter()
        """Bytes of each kind."""
        self.reduced_in: set[torch.dtype] = set()
        """The types of what was reduced: a policy or a hook may compress gradients for it."""

    @property
    def traffic(self) -> Traffic:
        """The collectives up to now."""
        return Traffic(dict(self._counts), sum(self.sizes.values()))

    def counting(self) -> OperationMode:
        """Returns what counts while it is entered."""
        return OperationMode(self._handle)

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace in _NAMESPACES:
            self._note(func, args)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any) -> None:
        name = func._schema.name.partition("::")[2].lstrip("_")
        if name in _WAITING:
            return
        kind = next((kind for part, kind in _KINDS if part in name), Collective.OTHER)
        self._counts[kind] += 1
        if kind in (Collective.REDUCE, Collective.SCATTER):
            self.reduced_in.update(_types(args))
        self.sizes[kind] += max((_size(arg) for arg in args), default=0)


def _types(argument: Any) -> set[torch.dtype]:
    """The types of the tensors in an argument."""
    if isinstance(argument, torch.Tensor):
        return {argument.dtype}
    return set[torch.dtype]().union(*map(_types, argument)) if isinstance(argument, list | tuple) else set()


def _size(argument: Any) -> int:
    """The bytes of the tensors in an argument; the larger side of a gather or scatter is what crosses the ranks."""
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_size, argument)) if isinstance(argument, list | tuple) else 0
