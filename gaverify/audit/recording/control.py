"""The runs that change something on purpose: losses multiplied, one term alone, weights moved, steps undone or led.

A run is led along the full-batch run: its optimizers step with that run's gradients, and have its buffers after it. The
accumulated run's own gradients are recorded first. Then its optimizers are given the full batch's for the one step, so
that its next update starts from the full-batch run's weights and optimizer state, and is judged for what it does
itself. What the step makes of the same gradients is compared as well: a step that divides by K shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gaverify.audit.recording.graph import Terms
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.values import copy_values, plain, same
from gaverify.audit.recording.watching import Watch, Watched
from gaverify.passes.precision import Coins, move, rounding_share
from gaverify.records.events import LossOrigin
from gaverify.tracebacks import LineHunt, Owner, Place

Work = Callable[[], AbstractContextManager[None]]
"""Surrounds the recorder's own code, which is not recorded."""


Roots = torch.Tensor | Sequence[torch.Tensor]
"""What a backward pass differentiates."""


class Control:
    """What changes put around the script's forwards and backward passes; nothing in a run without changes."""

    def __init__(self) -> None:
        self.forwards: list[Callable[[nn.Module], AbstractContextManager[None]]] = []
        self.losses: list[Callable[[Roots, int], AbstractContextManager[None]]] = []
        self.backwards: list[Callable[[Terms], AbstractContextManager[None]]] = []
        self.descriptions: list[Callable[[LossOrigin, Terms, Place | None], LossOrigin]] = []

    @contextmanager
    def forward(self, module: nn.Module) -> Iterator[None]:
        """Surrounds the forward of an outermost module."""
        with ExitStack() as stack:
            for around in self.forwards:
                stack.enter_context(around(module))
            yield

    @contextmanager
    def differentiation(self, roots: Roots, number: int) -> Iterator[None]:
        """Surrounds a backward pass or a call of `autograd.grad`, before which there were `number` backward passes."""
        with ExitStack() as stack:
            for around in self.losses:
                stack.enter_context(around(roots, number))
            yield

    @contextmanager
    def backward(self, roots: Roots, number: int, terms: Terms) -> Iterator[None]:
        """Surrounds a backward pass of a loss with these terms."""
        with self.differentiation(roots, number), ExitStack() as stack:
            for around in self.backwards:
                stack.enter_context(around(terms))
            yield

    def describe(self, terms: Terms, place: Place | None) -> LossOrigin:
        """Returns what the event of a backward pass tells of the changes."""
        origin = LossOrigin()
        for describe in self.descriptions:
            origin = describe(origin, terms, place)
        return origin


@contextmanager
def scale_losses(roots: Roots, factor: float) -> Iterator[None]:
    """Multiplies the gradients of what is differentiated, and so every gradient; a power of two rounds nothing."""
    several = [roots] if isinstance(roots, torch.Tensor) else roots
    changed = [root for root in several if root.requires_grad] if factor != 1.0 else []
    hooks = [root.register_hook(lambda gradient: gradient * factor) for root in changed]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class GradientClearing:
    """Clears gradients before each backward pass, and finds the user's line that writes them during the pass.

    Args:
        watch: The optimizers.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.count = 0
        """Backward passes before which there was something to clear."""
        self.setter: Place | None = None
        """The line that was found."""

    def clear(self) -> None:
        """Makes all gradients zero."""
        self.count += self._watch.clear()

    @contextmanager
    def find_setter(self, work: Work) -> Iterator[None]:
        """Surrounds a backward pass, in which the first change of a gradient tells the line; `work` runs the look."""

        def has_edits(_: Place) -> bool:
            with work():
                return self._watch.has_edits()

        hunt = LineHunt(has_edits, Owner.USER)
        if self.setter is None and sys.gettrace() is None:  # a debugger keeps its own trace function
            hunt.start()
        try:
            yield
        finally:
            hunt.stop()
            self.setter = self.setter or hunt.found


class Perturbation:
    """Moves each weight once by its own roundoff, for the noise floor (`passes.perturbation`).

    Args:
        unit: Unit roundoff of the coarsest arithmetic in the script; a parameter's own may be coarser still.
        coins: Seeds the directions.
        at_optimizer: Whether the weights are moved as soon as an optimizer is made.
    """

    def __init__(self, unit: float, coins: int = 0, *, at_optimizer: bool = False) -> None:
        self._unit, self.at_optimizer = unit, at_optimizer
        self._moved: dict[int, torch.Tensor] = {}  # keeps the parameters, so that no id is used again
        self._coins = Coins(coins)

    def move(self, parameters: Iterable[torch.Tensor]) -> None:
        """Moves those that have not been moved yet."""
        for parameter in parameters:
            if id(parameter) in self._moved or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._moved[id(parameter)] = parameter
            move(parameter, rounding_share(parameter, self._unit), self._coins)


class Lead:
    """Puts the full-batch run's gradients in place for a step, and the script's own back after it.

    Args:
        source: The folder of the full-batch run; None leads nothing.
    """

    def __init__(self, source: Path | None) -> None:
        self._source = source
        self._borrowed: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []

    def lend(self, entry: Watched) -> bool:
        """Puts the gradients of the same step of the same optimizer in place; returns whether it could."""
        path = self._source / f"gradients-{entry.index}-{entry.steps}.pt" if self._source is not None else None
        if path is None or not path.exists() or getattr(entry.optimizer, "grad_scale", None) is not None:
            return False
        stored = torch.load(path, mmap=True, weights_only=True)
        parameters = entry.sample.parameters
        borrowed = [_move_to_parameter(parameter, stored.get(at)) for at, parameter in enumerate(parameters)]
        if any(new is None and at in stored for at, new in enumerate(borrowed)):
            return False
        for parameter, new in zip(parameters, borrowed, strict=True):
            self._borrowed.append((parameter, parameter.grad, new))
            parameter.grad = new
        return True

    def put_back(self) -> bool:
        """Puts back what the script had, but where the step or a hook of it has removed or replaced the gradient.

        Returns:
            Whether the step was led.
        """
        led = bool(self._borrowed)
        for parameter, own_gradient, new in self._borrowed:
            if parameter.grad is new:
                parameter.grad = own_gradient
        self._borrowed = []
        return led


def _move_to_parameter(parameter: torch.Tensor, stored: torch.Tensor | None) -> torch.Tensor | None:
    """A stored gradient where the parameter is; None where it does not fit."""
    if stored is None or type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if stored.shape != parameter.shape or stored.dtype is not (
        parameter.dtype if parameter.grad is None else parameter.grad.dtype
    ):
        return None
    return stored.to(parameter.device)


class Buffers:
    """Keeps what a step leaves in the buffers of the script's models, or puts the full-batch run's there.

    Running statistics, queues and power iterations go on after each micro-batch, so that a later update would start
    from other buffers than the full batch's and be judged for what an earlier one did.

    Args:
        source: The folder of the full-batch run; None where this is that run.
    """

    def __init__(self, source: Path | None) -> None:
        self._source = source
        self._known: dict[str, torch.Tensor | None] = {}  # as they were when they were last seen

    def know(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Takes buffers as they are before the first forward: what never changes is not written."""
        for name, buffer in buffers.items():
            if name not in self._known:
                self._known[name] = copy_values(buffer)

    def keep(self, storage: Storage, step: str, buffers: Mapping[str, torch.Tensor]) -> None:
        """Writes the buffers that have changed since they were last written."""
        readable = {name: value for name, buffer in buffers.items() if (value := plain(buffer)) is not None}
        changed = {name: value for name, value in readable.items() if not same(self._known.get(name), value)}
        if changed:
            storage.tensors(f"buffers-{step}", changed)
        self._known |= {name: copy_values(value) for name, value in changed.items()}

    def put(self, step: str, buffers: Mapping[str, torch.Tensor]) -> None:
        """Puts in place what the full-batch run's buffers were after the same step."""
        path = self._source / f"buffers-{step}.pt" if self._source is not None else None
        if path is None or not path.exists():
            return
        for name, value in torch.load(path, map_location="cpu", mmap=True, weights_only=True).items():
            buffer = plain(buffers[name]) if name in buffers else None
            if buffer is not None and buffer.shape == value.shape and buffer.dtype is value.dtype:
                buffer.copy_(value)


@contextmanager
def synchronise_models(models: Iterable[torch.nn.Module]) -> Iterator[None]:
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
def use_evaluation_mode(buffers: Sequence[torch.Tensor], models: Iterable[torch.nn.Module]) -> Iterator[None]:
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
