"""Leaves hooks on gradients out in both runs: those of parameters, of modules, of tensors in the forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from gaverify.causes.rows import ControlFailed
from gaverify.causes.trace.traces import Frame
from gaverify.passes.gradients import PassProbe
from gaverify.passes.modes import FunctionMode
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

    def around(self, k: int | None) -> AbstractContextManager[Any]:
        """Intercepts the registrations of one pass."""
        return FunctionMode(self._called)

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Runs the backward of a forward that has registered hooks."""
        if not self.frames:
            raise ControlFailed("no hook is registered on a tensor")
        super().backward(k, loss, weight)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") != "register_hook":
            return func(*args, **kwargs)
        self.frames.append(calling_frame())
        return _Handle()


class _Handle:
    """Stands in for the handle of a hook that was not registered."""

    def remove(self) -> None:
        """Removes nothing."""
