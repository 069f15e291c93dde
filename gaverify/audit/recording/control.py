"""The machinery of changes: losses scaled, gradients cleared, weights moved, steps led along the full-batch run.

A run is led along the full-batch run if its optimizers step with that run's gradients. Its own gradients are recorded
before. So its next update starts from the full-batch run's weights and optimizer state; `carried` sets other state.
Each update is judged for its own faults only. The step's treatment of the same gradients is compared as well: a step
that divides by K shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gaverify.audit.folders import COPY
from gaverify.audit.recording.graph import Terms
from gaverify.audit.recording.watching import Watch, WatchedOptimizer
from gaverify.passes.calls import FunctionMode
from gaverify.passes.precision import Coins, move, rounding_share
from gaverify.records.events import LossOrigin
from gaverify.tracebacks import LineHunt, Owner, Place

# Lets a script that trains below float32 compute in float32, whose rounding hides no fault of its loop.


_HALVES = (torch.bfloat16, torch.float16)


def _in_float32(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a call of torch with float32 in place of a half precision."""
    if func in (torch.Tensor.bfloat16, torch.Tensor.half):  # `module.half()` calls them for every parameter
        func = torch.Tensor.float
    return func(*map(_lift_dtype, args), **{name: _lift_dtype(value) for name, value in kwargs.items()})


def _lift_dtype(value: Any) -> Any:
    """Returns float32 for a half precision, anything else as it is."""
    return torch.float32 if type(value) is torch.dtype and value in _HALVES else value


def compute_in_float32() -> None:
    """Disables autocast in this process, and lets no call of torch make a tensor of a half precision.

    A tensor from a file keeps its type until it is copied or converted.
    """
    autocast: Any = torch.autocast
    init_autocast: Callable[..., None] = autocast.__init__
    set_default_dtype = torch.set_default_dtype

    def init_disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        init_autocast(self, *args, **kwargs)
        self._enabled = False  # not as an argument: the script may pass `enabled` by position

    autocast.__init__ = init_disabled
    torch.set_default_dtype = lambda dtype: set_default_dtype(_lift_dtype(dtype))
    FunctionMode(_in_float32).__enter__()  # never left


# The machinery of changes: losses scaled, gradients cleared, weights moved, steps led along the full-batch run.


Work = Callable[[], AbstractContextManager[None]]
"""Surrounds the recorder's own code, which is not recorded."""


Roots = torch.Tensor | Sequence[torch.Tensor]
"""The tensor or tensors that a backward pass differentiates."""


class Control:
    """Contexts that changes put around the script's forwards and backward passes; none in a run without changes."""

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
    with ExitStack() as stack:
        for root in changed:
            stack.callback(root.register_hook(lambda gradient: gradient * factor).remove)
        yield


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
    """Moves each weight once by its own roundoff, for the noise floor.

    Args:
        roundoff: Unit roundoff of the coarsest arithmetic in the script; a parameter's own may be coarser still.
        seed: The seed of the directions.
        at_optimizer: Whether the weights are moved as soon as an optimizer is made.
    """

    def __init__(self, roundoff: float, seed: int = 0, *, at_optimizer: bool = False) -> None:
        self._roundoff, self.at_optimizer = roundoff, at_optimizer
        self._moved: dict[int, torch.Tensor] = {}  # keeps the parameters, so that no id is used again
        self._coins = Coins(seed)

    def move(self, parameters: Iterable[torch.Tensor]) -> None:
        """Moves the parameters that have not been moved yet."""
        for parameter in parameters:
            if id(parameter) in self._moved or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._moved[id(parameter)] = parameter
            move(parameter, rounding_share(parameter, self._roundoff), self._coins)


class Lead:
    """Replaces gradients by the full-batch run's for a step, and restores the script's own after it.

    Args:
        source: The folder of the full-batch run; None: nothing is replaced.
    """

    def __init__(self, source: Path | None) -> None:
        self._source = source
        # each parameter with its own gradient and the full batch's
        self._replaced: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []

    def replace_gradients(self, entry: WatchedOptimizer) -> bool:
        """Takes the gradients of the same step of the same optimizer; returns whether it could."""
        path = self._source / f"{COPY}-{entry.index}-{entry.steps}.pt" if self._source is not None else None
        # a fused step divides by the scale of a `GradScaler` itself, and the stored gradients may have another scale
        if path is None or not path.exists() or getattr(entry.optimizer, "grad_scale", None) is not None:
            return False
        # Mapped privately: a step that changes gradients in place leaves the file, which other runs read, as it is.
        stored = torch.load(path, mmap=True, weights_only=True)
        parameters = entry.sample.parameters
        gradients = [_move_to_parameter(parameter, stored.get(at)) for at, parameter in enumerate(parameters)]
        # All or none: a step with gradients of both runs would be a step of neither.
        if any(gradient is None and at in stored for at, gradient in enumerate(gradients)):
            return False
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._replaced.append((parameter, parameter.grad, gradient))
            parameter.grad = gradient
        return True

    def restore_gradients(self) -> bool:
        """Restores the script's own gradients.

        Returns:
            Whether the step was led.
        """
        was_led = bool(self._replaced)
        for parameter, own_gradient, gradient in self._replaced:
            if parameter.grad is gradient:  # else the step, or a hook of it, has cleared or replaced it
                parameter.grad = own_gradient
        self._replaced = []
        return was_led


def _move_to_parameter(parameter: torch.Tensor, stored: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a stored gradient on the parameter's device; None if it does not fit."""
    # Stored gradients are plain tensors, which cannot stand for those of a `DTensor`.
    if stored is None or type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if stored.shape != parameter.shape or stored.dtype is not (
        parameter.dtype if parameter.grad is None else parameter.grad.dtype
    ):
        return None
    return stored.to(parameter.device)


@contextmanager
def synchronise_models(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Lets DDP and FSDP2 reduce the gradients of these models in the next backward pass, by their public switches."""
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
    """Switches the modules that hold any of these buffers to evaluation mode; their submodules stay as they are."""
    wanted, modules = {id(buffer) for buffer in buffers}, (module for model in models for module in model.modules())
    owners = [module for module in modules if not wanted.isdisjoint(map(id, module.buffers(recurse=False)))]
    changed = [module for module in owners if module.training]
    for module in changed:
        # Not `eval()`, which would switch the submodules as well.
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True
