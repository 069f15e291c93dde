"""Neutralises state: restores it, drops what a forward writes to it, or sets it by one forward of the full batch.

Shapes: B samples in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from gaverify.passes.batching import fresh
from gaverify.passes.dispatch import PassMode
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import ModelState, RewindableIterator, generator_states
from gaverify.passes.randomness import Recorder
from gaverify.passes.user_code import loss_of
from gaverify.search.trace.state import find_owners, find_parameters, find_state, watch_assignments
from gaverify.search.trace.writes import address, divert_writes
from gaverify.torch_internals import no_dispatch_modes, without_torch_function


class RestoredState(PassProbe):
    """Starts every micro-batch from the state that the full batch started from."""

    def __init__(self, state: ModelState) -> None:
        self._state = state

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Restores before the forward."""
        with no_dispatch_modes(), without_torch_function():
            self._state.restore()
        yield


class PinnedState(PassProbe):
    """Keeps named state as it is in both runs: assignments and writes to it have no effect."""

    def __init__(self, experiment: Experiment, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._named = {name: get for name, (_, get) in find_state(experiment).items() if name in self._names}
        self._parameters = {name: p for name, p in find_parameters(experiment).items() if name in self._names}
        self._paths = {id(module): path for path, module in find_owners(experiment).items()}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Intercepts assignments to modules and writes to tensors."""
        # The addresses are looked up anew in each pass, because a restored buffer may be another tensor.
        values = {name: get() for name, get in self._named.items()} | self._parameters
        addresses = {address(value) for value in values.values() if issubclass(type(value), torch.Tensor)}
        positions = [(value, value.position) for value in values.values() if isinstance(value, RewindableIterator)]
        with watch_assignments(lambda *_: None, self._is_pinned), divert_writes(addresses):
            yield
        # An iterator moves without a write that could be dropped, so that it is rewound after the pass.
        for iterator, position in positions:
            iterator.rewind(position)

    def _is_pinned(self, module: nn.Module, name: str) -> bool:
        path = self._paths.get(id(module))
        return path is not None and (f"{path}.{name}" if path else name) in self._names


class PrimedState(PassProbe):
    """Runs the full batch forward before the full batch's pass and before the first micro-batch.

    Its changes of the state stay for the pass, and are restored with the rest of the state afterwards.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Runs the forward where a strategy starts."""
        if k in (None, 0):
            # Its random draws are not those of the pass: a recorder of its own, and generators put back afterwards.
            restore = generator_states()
            mode = PassMode(self._experiment.state, Recorder(), lift=self._experiment.lift)
            with no_dispatch_modes(), mode:
                loss_of(self._experiment, fresh(self._experiment.problem.batch), "the full batch")
            restore()
        yield


class RestoredGradients(PassProbe):
    """Adds every backward to the gradients that existed before its forward, which may have cleared them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = list(parameters.values())
        self._before: list[torch.Tensor | None] = []

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Copies the gradients before the forward."""
        self._before = [p.grad.clone() if p.grad is not None else None for p in self._parameters]
        yield

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts them back, then runs the backward."""
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient
        super().backward(k, loss, weight)
