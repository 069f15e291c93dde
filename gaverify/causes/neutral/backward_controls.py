"""What may make a backward depend on the batch, neutralised in both runs: hooks, constants, custom functions.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from gaverify.causes.rows import ControlFailed, rows_for, rows_of_all
from gaverify.causes.trace.backward_listening import applications
from gaverify.causes.trace.operations import FunctionCalls
from gaverify.causes.trace.traces import DECISIONS, Frame
from gaverify.passes.gradients import PassProbe
from gaverify.passes.modes import FunctionMode, OperationMode, operation_name
from gaverify.tracebacks import calling_frame, hands_over

Registry = dict[int, Any]


def parameter_registries(parameter: torch.Tensor) -> list[Registry]:
    """The registries of gradient hooks of a parameter that exist."""
    found = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [registry for registry in found if registry is not None]


def module_registries(module: nn.Module) -> list[Registry]:
    """The registries of backward hooks of a module."""
    return [module._backward_hooks, module._backward_pre_hooks]


class WithoutHooks(PassProbe):
    """Empties registries of hooks for the length of a pass."""

    def __init__(self, registries: Sequence[Registry]) -> None:
        self._registries = registries

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Empties the registries, and fills them again."""
        kept = [dict(registry) for registry in self._registries]
        for registry in self._registries:
            registry.clear()
        try:
            yield
        finally:
            for registry, hooks in zip(self._registries, kept, strict=True):
                registry.update(hooks)


class WithoutTensorHooks(PassProbe):
    """Lets `Tensor.register_hook` have no effect in a forward; keeps the lines that called it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Intercepts the registrations of one pass."""
        with FunctionMode(self._called):
            yield

    @hands_over
    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") != "register_hook":
            return func(*args, **kwargs)
        self.frames.append(calling_frame())
        return _Handle()


class _Handle:
    """Stands in for the handle of a hook that was not registered."""

    def remove(self) -> None:
        """Removes nothing."""


class ConstantsHeld(PassProbe):
    """Gives micro-batches the full batch's numbers wherever the forward cuts a value out of the graph.

    `detach`, `item`, blocks without gradients: their results are constants to the backward, and when they were computed
    from the batch, the backward depends on the batch though every forward may agree. Values with a row per sample stay.

    Args:
        only: Lines of the user's code; None: all of them.
    """

    def __init__(self, only: Collection[Frame] | None = None) -> None:
        self._only = only
        self.frames: list[Frame] = []
        self._values: dict[Any, Any] = {}
        self._calls = FunctionCalls()
        self._numbers = 0
        self._k: int | None = None

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Keeps the full batch's values, and hands them out to the micro-batches."""
        self._k, self._calls, self._numbers = k, FunctionCalls(), 0
        if k is None:
            self._values, self.frames = {}, []
        with FunctionMode(self._called), OperationMode(self._read):
            yield

    @hands_over
    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = self._calls.key(func)
        result = func(*args, **kwargs)
        cut = isinstance(result, torch.Tensor) and result.is_floating_point() and not result.requires_grad
        with torch._C.DisableTorchFunction():
            inside = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))
        if not (cut and inside and self._asked(key[1])):
            return result
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            value = self._exchanged(key, result.detach().clone())
            return value.clone() if value.shape == result.shape else result

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Exchanges numbers that Python code reads out of a tensor."""
        result, name = func(*args, **kwargs), operation_name(func)
        if name not in DECISIONS:
            return result
        frame = calling_frame()
        if not self._asked(frame):
            return result
        self._numbers += 1
        return self._exchanged((name, frame, -self._numbers), result)

    def _asked(self, frame: Frame) -> bool:
        if self._only is not None and frame not in self._only:
            return False
        if self._k is None and frame is not None and frame not in self.frames:
            self.frames.append(frame)
        return True

    def _exchanged(self, key: Any, result: Any) -> Any:
        if self._k is None:
            self._values[key] = result
        return self._values.get(key, result)


class InputGradientsTaken(PassProbe):
    """Gives micro-batches the full batch's gradients, sample by sample, for what one custom autograd function is given.

    Args:
        position: Its number among the applications of custom functions in a forward.
        bounds: `start, stop` of each micro-batch.
        batch_size: B.
    """

    def __init__(self, position: int, bounds: Sequence[tuple[int, int]], batch_size: int) -> None:
        self._position, self._bounds, self._size = position, bounds, batch_size
        self._values: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Registers hooks on the function's arguments; they fire in the pass's backward."""
        seen = 0

        @hands_over
        def changed(kind: type, args: Any, call: Callable[[], Any]) -> Any:
            nonlocal seen
            seen += 1
            if seen - 1 == self._position:
                for place, arg in enumerate(args):
                    if isinstance(arg, torch.Tensor) and arg.requires_grad:
                        self._hook(k, place, arg)
            return call()

        with applications(changed):
            yield

    def _hook(self, k: int | None, place: int, arg: torch.Tensor) -> None:
        part = arg.detach()
        if k is None:
            self._values[place] = part.clone()
            arg.register_hook(lambda gradient: self._gradients.update({place: gradient.detach().clone()}))
        elif place in self._values and self._values[place].shape != part.shape:
            start, stop = self._bounds[k]
            arg.register_hook(
                lambda _: rows_for(self._values[place], part, start, stop, self._size, self._gradients[place])
            )


class OutputsHeld(PassProbe):
    """Holds what one custom autograd function returns constant, or lets its gradients pass unchanged.

    Args:
        position: Its number among the applications of custom functions in a forward.
        bounds: `start, stop` of each micro-batch.
        batch_size: B.
        straight: Keep the values and let gradients pass through unchanged, instead of cutting the graph.
    """

    def __init__(
        self, position: int, bounds: Sequence[tuple[int, int]], batch_size: int, *, straight: bool = False
    ) -> None:
        self._position, self._bounds, self._size, self._straight = position, bounds, batch_size, straight
        self._value: Any = None

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Replaces the result for the length of a pass."""
        seen = 0

        @hands_over
        def changed(kind: type, args: Any, call: Callable[[], Any]) -> Any:
            nonlocal seen
            seen += 1
            result = call()
            if seen - 1 != self._position:
                return result
            return self._passed(args, result) if self._straight else self._held(k, result)

        with applications(changed):
            yield

    def _held(self, k: int | None, result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            raise ControlFailed("the custom function returns no single tensor")
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if k is None:
                self._value = result.detach().clone()
                return self._value.clone()
            return rows_of_all(self._value, result, *self._bounds[k], self._size)

    def _passed(self, args: Any, result: Any) -> Any:
        source = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad), None)
        if source is None or not isinstance(result, torch.Tensor) or source.shape != result.shape:
            raise ControlFailed("the custom function changes the shape of its input")
        return source + (result - source).detach()
