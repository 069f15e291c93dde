"""Neutralises state: restores it before every micro-batch, or lets what a forward writes to it have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from gaverify.causes.trace.state import all_parameters, assignments, named_state, owners
from gaverify.causes.trace.writes import address, writes_diverted
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import ModelState
from gaverify.passes.task import Task


class StateRestored(PassProbe):
    """Starts every micro-batch from the state that the full batch started from."""

    def __init__(self, state: ModelState) -> None:
        self._state = state

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Restores before the forward."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._state.restore()
        yield


class StateHeld(PassProbe):
    """Holds named state still in both runs: assignments and writes to it have no effect."""

    def __init__(self, task: Task, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._named = {name: get for name, (_, get) in named_state(task).items() if name in self._names}
        self._parameters = {name: p for name, p in all_parameters(task).items() if name in self._names}
        self._paths = {id(module): path for path, module in owners(task).items()}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Intercepts assignments to modules and writes to tensors."""
        values = {name: get() for name, get in self._named.items()} | self._parameters
        held = {address(value) for value in values.values() if issubclass(type(value), torch.Tensor)}
        with assignments(lambda *_: None, self._keeps), writes_diverted(held):
            yield

    def _keeps(self, module: nn.Module, name: str) -> bool:
        path = self._paths.get(id(module))
        return path is not None and (f"{path}.{name}" if path else name) in self._names
