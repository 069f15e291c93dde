"""Holds values constant in both runs: results of torch calls, outputs of modules, decisions that Python code takes.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`; a result may hold m rows per sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from gaverify.causes.rows import ControlFailed, rows_of_all
from gaverify.causes.trace.operations import FunctionCalls
from gaverify.causes.trace.traces import DECISIONS
from gaverify.passes.gradients import PassProbe
from gaverify.passes.modes import FunctionMode, OperationMode, operation_name
from gaverify.records.operations import FunctionKey
from gaverify.tracebacks import calling_frame


class Held(PassProbe):
    """Holds the results of some torch calls constant: the full batch's values, without a graph, in both runs.

    Args:
        functions: The outermost torch calls of the forward, by name, line and occurrence.
        bounds: `start, stop` of each micro-batch; a result with a row per sample is handed out by these.
        batch_size: B.
        order: How samples lie in results with several rows of each, as in `rows_for`.
    """

    def __init__(
        self,
        functions: Sequence[FunctionKey],
        bounds: Sequence[tuple[int, int]],
        batch_size: int,
        order: int | None = None,
    ) -> None:
        self._functions, self._bounds, self._size = frozenset(functions), bounds, batch_size
        self._order = order
        self._values: dict[FunctionKey, Any] = {}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Replaces the results for the length of the forward."""
        calls = FunctionCalls()

        def handle(func: Any, args: Any, kwargs: Any) -> Any:
            key = calls.key(func)
            return self.replaced(k, key, func(*args, **kwargs))

        with FunctionMode(handle):
            yield

    def replaced(self, k: int | None, key: FunctionKey, result: Any) -> Any:
        """Returns what the call of this name shall return."""
        if key not in self._functions:
            return result
        name = key[0]
        in_place = name.endswith("_") and not name.endswith("__")
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            raise ControlFailed(f"the result of `{name}` cannot be held constant")
        with _disable_current_modes():  # a trace shall not see the copies: they are no operations of the user's
            if k is None:
                self._values[key] = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), result)
                held = tree_map_only(torch.Tensor, torch.clone, self._values[key])
            elif key not in self._values:
                raise ControlFailed("the micro-batches call other torch functions than the full batch")
            else:
                held = rows_of_all(self._values[key], result, *self._bounds[k], self._size, self._order)
            return _written(result, held) if in_place else held


def _written(target: Any, value: Any) -> torch.Tensor:
    """Puts a constant where a call wrote in place: other code may hold the tensor itself.

    Raises:
        ControlFailed: It is trained, or shares its memory with others.
    """
    if not isinstance(target, torch.Tensor) or target._is_view() or (target.is_leaf and target.requires_grad):
        raise ControlFailed("what a call writes into trained or shared memory cannot be held constant")
    if target.grad_fn is not None:
        target.detach_()
    with torch.no_grad():
        return target.copy_(value)


class OutputHeld(PassProbe):
    """Holds outputs of one module constant: the full batch's values without a graph, in both runs.

    Args:
        module: Whose outputs.
        bounds: `start, stop` of each micro-batch.
        batch_size: B.
        positions: Those of the output's tensors that are held; none: all of them.
    """

    def __init__(
        self, module: nn.Module, bounds: Sequence[tuple[int, int]], batch_size: int, positions: Sequence[int] = ()
    ) -> None:
        self._module, self._bounds, self._size = module, bounds, batch_size
        self._positions = frozenset(positions)
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
                held = tree_map_only(torch.Tensor, torch.clone, self._values[-1])
            elif self._calls > len(self._values):
                raise ControlFailed("the micro-batches call the module more often than the full batch")
            else:
                held = rows_of_all(self._values[self._calls - 1], output, *self._bounds[self._k], self._size)
        return self._chosen(held, output)

    def _chosen(self, held: Any, output: Any) -> Any:
        """The held outputs, with those as they are that need not be held."""
        if not self._positions:
            return held
        (kept, form), live, tensor = tree_flatten(held), tree_leaves(output), -1
        for place, leaf in enumerate(kept):
            tensor += isinstance(leaf, torch.Tensor)
            if isinstance(leaf, torch.Tensor) and tensor not in self._positions:
                kept[place] = live[place]
        return tree_unflatten(kept, form)


class DecisionsHeld(PassProbe):
    """Lets micro-batches decide as the full batch did: numbers that Python code reads out of tensors on one line."""

    def __init__(self, frame: tuple[str, int]) -> None:
        self.frame = frame
        self.values: list[Any] = []
        self._k: int | None = None
        self._calls = 0

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Keeps the numbers of the full batch, and gives them to the micro-batches."""
        self._k, self._calls = k, 0
        if k is None:
            self.values = []
        with OperationMode(self._decide):
            yield

    def _decide(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if operation_name(func) not in DECISIONS or calling_frame() != self.frame:
            return result
        self._calls += 1
        if self._k is None:
            self.values.append(result)
            return result
        if self._calls > len(self.values):
            raise ControlFailed("the micro-batches decide more often than the full batch")
        return self.values[self._calls - 1]


class Evaluated(PassProbe):
    """Holds modules in `eval` mode: statistics are frozen, and both runs use the stored ones."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Switches the modules for the length of a pass."""
        flags = [(module, module.training) for root in self._modules for module in root.modules()]
        try:
            for root in self._modules:
                root.eval()
            yield
        finally:
            for module, flag in flags:
                module.training = flag
