"""Random operations: a table of the special ones, and what one that has run drew, for which rows.

Shapes: what is drawn has the shape of the input for which it is drawn, where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gaverify.passes.calls import Handler, OperationMode, operation_name
from gaverify.passes.isolation.globals import comparable, state_of
from gaverify.passes.precision import Arithmetic, default_generator, product_of, with_number
from gaverify.passes.randomness.packing import PackedRows, tells_rows
from gaverify.tracebacks import hands_over

Args = tuple[Any, ...]


def _numbers(args: Args) -> Args:
    return tuple(arg for arg in args if isinstance(arg, int | float | bool))


class RandomOperation(NamedTuple):
    """How to read a random operation; the defaults hold for most."""

    drawn: Callable[[Args, Any], Any] = lambda args, result: result
    """Arguments, result → the numbers that it drew."""
    asked: Callable[[Args], Args] = _numbers
    """Arguments → those on which the distribution depends."""
    typical: Callable[[Args, torch.Tensor], torch.Tensor] = lambda args, drawn: torch.ones_like(drawn)
    """Arguments, drawn numbers → numbers that it might have drawn, the same for every sample."""
    applied: Callable[[torch.Tensor, torch.Tensor, Args], torch.Tensor] | None = None
    """Input, drawn numbers, arguments → its result; None where the result is what was drawn."""
    mask: bool = False
    """Whether it draws a mask. TorchScript turns a fused dropout into a mask of its own, and back."""


def _reverse_order(args: Args, drawn: torch.Tensor) -> torch.Tensor:
    # the identity would hide that samples meet through a permutation
    return torch.arange(drawn.numel() - 1, -1, -1, device=drawn.device, dtype=drawn.dtype)


def _least_integer(args: Args, drawn: torch.Tensor) -> torch.Tensor:
    numbers = [arg for arg in args if isinstance(arg, int)]
    return torch.full_like(drawn, min(numbers) if len(numbers) > 1 else 0)


def _middle_of_range(args: Args, drawn: torch.Tensor) -> torch.Tensor:
    bounds = _numbers(args)
    low, high = bounds[:2] if len(bounds) > 1 else (0.0, 1.0)
    return torch.full_like(drawn, (low + high) / 2)


def _select_mask(source: torch.Tensor, mask: torch.Tensor, args: Args) -> torch.Tensor:
    keep = 1.0 - args[1]
    return source * mask.to(source.dtype) / keep if keep > 0 else torch.zeros_like(source)


_DROPOUT = RandomOperation(
    lambda args, result: result[1], lambda args: (1.0 - args[1],), applied=_select_mask, mask=True
)
_RRELU = RandomOperation(lambda args, result: args[1], applied=lambda source, noise, args: source * noise)
_ZERO = RandomOperation(typical=lambda args, drawn: torch.zeros_like(drawn))
_BETWEEN = RandomOperation(typical=_middle_of_range)
_INTEGER = RandomOperation(typical=_least_integer)
_PLAIN = RandomOperation()
_KINDS = {
    "native_dropout": _DROPOUT,
    "_fused_dropout": _DROPOUT,
    "bernoulli": RandomOperation(mask=True),
    "rrelu_with_noise": _RRELU,
    "rrelu_with_noise_functional": _RRELU,
    "randperm": RandomOperation(typical=_reverse_order),
    "multinomial": _ZERO,
    "random": _ZERO,
    "randint": _INTEGER,
    "randint_like": _INTEGER,
    "uniform": _BETWEEN,
    "rand": _BETWEEN,
    "rand_like": _BETWEEN,
}


class Drawing:
    """A random operation that has run.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its named ones.
        like: The tensor after whose shape the tensor that is drawn into was made: the input of a dropout.
    """

    @hands_over
    def __init__(self, func: Any, args: Args, kwargs: dict[str, Any], like: torch.Tensor | None = None) -> None:
        self.operation = operation_name(func).rstrip("_")  # `bernoulli` for `aten::bernoulli_.float`
        self.args, self._kwargs, self.kind = args, kwargs, kind_of(self.operation)
        self.before = generator_key(args, kwargs)
        self.source = self._source(func._schema.name.endswith("_"), like)
        self.result = func(*args, **kwargs)
        drawn = self.kind.drawn(args, self.result)
        is_visible = isinstance(drawn, torch.Tensor) and "attention" not in self.operation
        self.drawn: torch.Tensor | None = _plain(drawn) if is_visible else None  # None where it stays inside the kernel

    def _source(self, writes: bool, like: torch.Tensor | None) -> torch.Tensor | None:
        """The input whose rows the drawn rows belong to, if there is one."""
        source = self.args[0] if self.args and isinstance(self.args[0], torch.Tensor) else None
        if writes and self.kind is not _RRELU:
            source = like  # what is drawn into has no contents of its own
        if source is None or source.layout not in (torch.strided, torch.jagged):
            return None
        return _plain(source).clone() if writes and self.kind is _RRELU else _plain(source)

    @property
    def has_moved(self) -> bool:
        """Whether the generator has moved."""
        return generator_key(self.args, self._kwargs) != self.before

    def replace_numbers(self, drawn: torch.Tensor, value: torch.Tensor) -> Any:
        """Puts other numbers into the result, in place of those that were drawn, and returns it."""
        drawn.copy_(value)
        if self.kind.applied is not None and self.source is not None:
            into = self.result if isinstance(self.result, torch.Tensor) else self.result[0]
            _plain(into).copy_(self.kind.applied(self.source, drawn, self.args))
        return self.result


def draw_mode(
    handler: Handler, arithmetic: Arithmetic | None = None, packed: PackedRows | None = None
) -> OperationMode:
    """Returns a mode that gives every random operation to `handler`, and notes products and packed sequences."""

    @hands_over
    def handle(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
        if arithmetic is not None:
            arithmetic.note(product_of(func), args)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return handler(func, args, kwargs)
        result = func(*args, **kwargs)
        if packed is not None and tells_rows(func):
            packed.note(func, args, result)
        return result

    return OperationMode(handle)


def generator_key(args: Args, kwargs: Mapping[str, Any]) -> tuple[int, Any]:
    """Identifies the state of the generator that an operation will draw from."""
    generator = kwargs.get("generator")
    if generator is None:
        generator = next((arg for arg in args if isinstance(arg, torch.Generator)), None)
    if generator is not None:
        return id(generator), comparable(state_of(generator))
    device = kwargs.get("device")
    if device is None:
        device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
    device = with_number(torch.device(device))
    return hash(device), comparable(state_of(default_generator(device))) if device.type != "meta" else None


def draws_unseen(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws from a state of its own: no generator moves, and no mask comes out.

    cuDNN's recurrent layers do, and their like: dropout between layers reads a buffer that was seeded once.
    """
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    return "rnn" in operation_name(func) and bool(named.get("train")) and float(named.get("dropout") or 0.0) > 0.0


def kind_of(operation: str) -> RandomOperation:
    """Returns what is special about an operation."""
    return _KINDS.get(operation, _PLAIN)


def are_interchangeable(ours: str, full: str) -> bool:
    """Whether draws of two operations may stand for each other."""
    return ours == full or (kind_of(ours).mask and kind_of(full).mask)


def have_same_arguments(ours: Args, full: Args, shape: Sequence[int], full_shape: Sequence[int]) -> bool:
    """Whether two draws were asked for the same; an argument that is a size may follow the batch."""
    if len(ours) != len(full):
        return False
    return all(
        our == full_value or math.isclose(our, full_value) or (full_value in full_shape and our in shape)
        for our, full_value in zip(ours, full, strict=True)
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a nested tensor end to end, in the memory where they are; any other tensor as it is."""
    return tensor.values() if tensor.is_nested else tensor
