"""The collectives of `torch.distributed` that run in this process: counted, with the bytes of their tensors.

Gathers of what is trained are noted besides, and a control lets them hand the gradient back.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gaverify.passes.calls import OperationMode
from gaverify.records.ranks import Collective, Traffic
from gaverify.remedies import all_gather

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
_INTO_ONE = ("all_gather_into_tensor", "all_gather_single")  # the same under its old and its new name
_NAMES = ("all_gather", *_INTO_ONE)
Gather = Callable[..., Any]


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


@contextmanager
def gathers_with_gradient() -> Iterator[None]:
    """Lets `all_gather` and `all_gather_into_tensor` hand gradients back to the ranks that the parts came from.

    What is gathered keeps its values; only the backward changes. Tensors that need no gradient are gathered as before.
    """
    plain = _find_gathers()
    try:
        _put(_with_gradient(plain))
        yield
    finally:
        _put(plain)


def watch_gathers(note: Callable[[], None], *, with_gradient: bool) -> None:
    """Calls `note` before every gather of a tensor that needs a gradient, for as long as this process lives.

    Args:
        note: Told that a gather begins, on the stack of its caller.
        with_gradient: Let them hand gradients back, as `gathers_with_gradient` does.
    """
    plain, running = _find_gathers(), [False]
    inner = _with_gradient(plain) if with_gradient else plain

    def wrap_gather(name: str) -> Gather:
        @functools.wraps(plain[name])
        def gather(*args: Any, **kwargs: Any) -> Any:
            tensors = [*args[1:2], *(kwargs.get(key) for key in ("tensor", "input_tensor"))]
            outermost = not running[0]  # the old name calls the new one
            if outermost and any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in tensors):
                note()
            running[0] = True
            try:
                return inner[name](*args, **kwargs)
            finally:
                running[0] = not outermost

        return gather

    _put({name: wrap_gather(name) for name in plain})


def _find_gathers() -> dict[str, Gather]:
    return {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}


def _put(functions: Mapping[str, Gather]) -> None:
    for name, function in functions.items():
        for home in (dist, dist.distributed_c10d):
            setattr(home, name, function)


def _with_gradient(plain: Mapping[str, Gather]) -> dict[str, Gather]:
    """The remedy in place of each gather, with torch's own names for what they are given."""

    def into_list(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or not tensor.requires_grad:
            return plain["all_gather"](tensor_list, tensor, group, async_op)
        with torch.enable_grad():  # the user's code may gather under `no_grad`, which is the same fault
            tensor_list[:] = all_gather(tensor, group)
        return None

    def into_one(name: str) -> Gather:
        def gather(
            output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
        ) -> Any:
            if async_op or not input_tensor.requires_grad:
                return plain[name](output_tensor, input_tensor, group, async_op)
            with torch.enable_grad():
                output_tensor.copy_(torch.stack(all_gather(input_tensor, group)).reshape(output_tensor.shape))
            return None

        return gather

    return {"all_gather": into_list} | {name: into_one(name) for name in _INTO_ONE if name in plain}
