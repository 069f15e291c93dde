"""Holds values constant in both runs: results of torch calls, outputs of modules, decisions that Python code takes.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`; a result may hold m rows per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from gaverify.errors import GaverifyError
from gaverify.gradients import PassProbe
from gaverify.measurements import FunctionKey
from gaverify.probes.operations import FunctionCalls
from gaverify.probes.traces import DECISIONS
from gaverify.tracebacks import calling_frame


class ControlFailed(GaverifyError):
    """A control run that could not be made; the message says why."""


class Held(PassProbe):
    """Holds the results of some torch calls constant: the full batch's values, without a graph, in both runs.

    Args:
        functions: The outermost torch calls of the forward, by name, line and occurrence.
        bounds: `start, stop` of each micro-batch; a result with a row per sample is handed out by these.
        batch_size: B.
    """

    def __init__(self, functions: Sequence[FunctionKey], bounds: Sequence[tuple[int, int]], batch_size: int) -> None:
        self._functions, self._bounds, self._size = frozenset(functions), bounds, batch_size
        self._values: dict[FunctionKey, Any] = {}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Replaces the results for the length of the forward."""
        with _Replaced(self, k):
            yield

    def replaced(self, k: int | None, key: FunctionKey, result: Any) -> Any:
        """Returns what the call of this name shall return."""
        if key not in self._functions:
            return result
        name = key[0]
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            raise ControlFailed(f"the result of `{name}` cannot be held constant")
        with _disable_current_modes():  # a trace shall not see the copies: they are no operations of the user's
            if k is None:
                self._values[key] = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), result)
                return tree_map_only(torch.Tensor, torch.clone, self._values[key])
            if key not in self._values:
                raise ControlFailed("the micro-batches call other torch functions than the full batch")
            return rows_of_all(self._values[key], result, *self._bounds[k], self._size)


class OutputHeld(PassProbe):
    """Holds the outputs of one module constant: the full batch's values without a graph, in both runs."""

    def __init__(self, module: nn.Module, bounds: Sequence[tuple[int, int]], batch_size: int) -> None:
        self._module, self._bounds, self._size = module, bounds, batch_size
        self._values: list[Any] = []
        self._k: int | None = None
        self._calls = 0

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Replaces the outputs for the length of a pass."""
        self._k, self._calls = k, 0
        if k is None:
            self._values = []
        handle = self._module.register_forward_hook(self._replace)
        try:
            yield
        finally:
            handle.remove()

    def _replace(self, _: nn.Module, inputs: Any, output: Any) -> Any:
        self._calls += 1
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if self._k is None:
                self._values.append(tree_map_only(torch.Tensor, lambda t: t.detach().clone(), output))
                return tree_map_only(torch.Tensor, torch.clone, self._values[-1])
            if self._calls > len(self._values):
                raise ControlFailed("the micro-batches call the module more often than the full batch")
            return rows_of_all(self._values[self._calls - 1], output, *self._bounds[self._k], self._size)


class DecisionsHeld(PassProbe):
    """Lets micro-batches decide as the full batch did: numbers that Python code reads out of tensors on one line."""

    def __init__(self, frame: tuple[str, int]) -> None:
        self.frame = frame
        self.values: list[Any] = []

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Keeps the numbers of the full batch, and gives them to the micro-batches."""
        if k is None:
            self.values = []
        with _Decisions(self, k):
            yield


class _Decisions(TorchDispatchMode):
    """Exchanges the results of operations that return Python numbers."""

    def __init__(self, held: DecisionsHeld, k: int | None) -> None:
        super().__init__()
        self._held, self._k, self._calls = held, k, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[-1] not in DECISIONS or calling_frame() != self._held.frame:
            return result
        self._calls += 1
        if self._k is None:
            self._held.values.append(result)
            return result
        if self._calls > len(self._held.values):
            raise ControlFailed("the micro-batches decide more often than the full batch")
        return self._held.values[self._calls - 1]


def rows_of_all(value: Any, result: Any, start: int, stop: int, size: int) -> Any:
    """Returns the rows of a micro-batch for every tensor of a result.

    Raises:
        ControlFailed: The micro-batch's result has another form.
    """
    whole, (parts, form) = tree_leaves(value), tree_flatten(result)
    if len(whole) != len(parts):
        raise ControlFailed("the micro-batches' results have another form than the full batch's")
    rows = [
        rows_for(old, new, start, stop, size) if isinstance(new, torch.Tensor) else new
        for old, new in zip(whole, parts, strict=True)
    ]
    return tree_unflatten(rows, form)


def rows_for(
    value: torch.Tensor, part: torch.Tensor, start: int, stop: int, size: int, cotangent: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the rows of samples `start` to `stop - 1` of a full-batch tensor, in the shape of the micro-batch's.

    A dimension with several rows per sample may hold the samples as its outer or as its inner index (two views of a
    batch, one after the other): the reading that comes closer to the micro-batch's own values is taken.

    Args:
        value: The full batch's tensor.
        part: The micro-batch's tensor.
        start: The first sample.
        stop: One past the last sample.
        size: B.
        cotangent: Takes its rows in place of those of `value`, which has its shape.

    Raises:
        ControlFailed: The shapes do not correspond.
    """
    wanted = value if cotangent is None else cotangent
    if value.shape == part.shape:
        return wanted.clone()
    if value.dim() != part.dim():
        raise ControlFailed(f"shapes {list(value.shape)} and {list(part.shape)} do not correspond")
    readings = list(_readings(value, part.shape, start, stop, size))
    if len(readings) > 1:
        readings.sort(key=lambda take: float((take(value.detach()) - part.detach()).abs().double().sum()))
    return readings[0](wanted).clone()


def _readings(
    value: torch.Tensor, shape: Sequence[int], start: int, stop: int, size: int
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yields how the rows may be taken: with the samples as the outer, and where that differs as the inner index."""
    changed = [dim for dim, (whole, part) in enumerate(zip(value.shape, shape, strict=True)) if whole != part]
    folds = [value.shape[dim] // size for dim in changed]
    for dim, fold in zip(changed, folds, strict=True):
        if value.shape[dim] % size or shape[dim] != fold * (stop - start):
            raise ControlFailed(f"shapes {list(value.shape)} and {list(shape)} do not correspond")

    def outer(tensor: torch.Tensor) -> torch.Tensor:
        for dim, fold in zip(changed, folds, strict=True):
            tensor = tensor.narrow(dim, start * fold, shape[dim])
        return tensor

    def inner(tensor: torch.Tensor) -> torch.Tensor:
        for dim, fold in zip(changed, folds, strict=True):
            rows = tensor.unflatten(dim, (fold, size)).narrow(dim + 1, start, stop - start)
            tensor = rows.flatten(dim, dim + 1)
        return tensor

    yield outer
    if max(folds) > 1:
        yield inner


class _Replaced(TorchFunctionMode):
    """Names the outermost torch calls as the trace does, and exchanges results."""

    def __init__(self, held: Held, k: int | None) -> None:
        super().__init__()
        self._held, self._k, self._calls = held, k, FunctionCalls()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = self._calls.key(func)
        return self._held.replaced(self._k, key, func(*args, **(kwargs or {})))
