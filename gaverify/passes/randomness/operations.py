"""Random operations: what they draw, from which generator, and for the rows of which input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gaverify.passes.devices import default_generator, with_number
from gaverify.passes.isolation.generators import comparable, state_of

MASKED = ("native_dropout", "_fused_dropout")
"""Operations that return their mask beside the masked input."""


def name_of(func: Any) -> str:
    """Returns `bernoulli` for `aten::bernoulli_.float`."""
    return str(func._schema.name.split("::")[-1].rstrip("_"))


def generator_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bytes]:
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
    return hash(device), comparable(state_of(default_generator(device)))


def drawn_by(operation: str, args: tuple[Any, ...], result: Any) -> torch.Tensor | None:
    """The random tensor in an operation's result; None where it stays inside the kernel."""
    if operation in MASKED:
        return plain(result[1])
    if operation.startswith("rrelu_with_noise"):
        return plain(args[1])
    return plain(result) if isinstance(result, torch.Tensor) and "attention" not in operation else None


def draws_unseen(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws from a state of its own: no generator moves, and no mask comes out.

    cuDNN's recurrent layers do, and their like: dropout between layers reads a buffer that was seeded once.
    """
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    return "rnn" in name_of(func) and bool(given.get("train")) and float(given.get("dropout") or 0.0) > 0.0


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a nested tensor end to end, in the memory where they are; any other tensor as it is."""
    return tensor.values() if tensor.is_nested else tensor


def source_of(func: Any, args: tuple[Any, ...], like: torch.Tensor | None) -> torch.Tensor | None:
    """The input whose rows the drawn rows belong to, if there is one.

    Args:
        func: The operation.
        args: Its arguments.
        like: The tensor after whose shape the tensor that is drawn into was made: the input of a dropout.
    """
    source = args[0] if args and isinstance(args[0], torch.Tensor) else None
    written = func._schema.name.endswith("_") and not name_of(func).startswith("rrelu_with_noise")
    source = like if written else source  # what is drawn into has no contents of its own
    return plain(source) if source is not None and source.layout in (torch.strided, torch.jagged) else None


def kept_source(func: Any, source: torch.Tensor | None) -> torch.Tensor | None:
    """The source, as a copy where the operation is about to overwrite it."""
    overwritten = source is not None and func._schema.name.endswith("rrelu_with_noise_")
    return source.clone() if overwritten and source is not None else source


def kind_of(operation: str) -> str:
    """A mask is a mask, whether it was drawn on its own or by a fused dropout (TorchScript changes its mind)."""
    return "mask" if operation in MASKED or operation.startswith("bernoulli") else operation


def arguments_of(operation: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """The numbers that a draw was asked for; of a mask the share that it keeps."""
    if operation in MASKED:
        return (1.0 - args[1],)
    return tuple(arg for arg in args if isinstance(arg, int | float | bool))


def same_arguments(
    ours: tuple[Any, ...], full: tuple[Any, ...], shape: Sequence[int], full_shape: Sequence[int]
) -> bool:
    """Whether two draws were asked for the same; an argument that is a size may follow the batch."""
    if len(ours) != len(full):
        return False
    return all(
        our == whole or math.isclose(our, whole) or (whole in full_shape and our in shape)
        for our, whole in zip(ours, full, strict=True)
    )


def typical(operation: str, args: tuple[Any, ...], drawn: torch.Tensor) -> torch.Tensor:
    """A value that the operation might have drawn, the same for every sample."""
    if operation == "randperm":
        # not the identity: it would hide that samples meet through a permutation
        return torch.arange(drawn.numel() - 1, -1, -1, device=drawn.device, dtype=drawn.dtype)
    if operation in ("multinomial", "random"):
        return torch.zeros_like(drawn)
    if operation.startswith("randint"):
        numbers = [arg for arg in args if isinstance(arg, int)]
        return torch.full_like(drawn, min(numbers) if len(numbers) > 1 else 0)
    if operation in ("uniform", "rand", "rand_like"):
        bounds = arguments_of(operation, args)
        low, high = bounds[:2] if len(bounds) > 1 else (0.0, 1.0)
        return torch.full_like(drawn, (low + high) / 2)
    return torch.ones_like(drawn)


def replaced(
    operation: str,
    args: tuple[Any, ...],
    result: Any,
    drawn: torch.Tensor,
    value: torch.Tensor,
    source: torch.Tensor | None,
) -> Any:
    """Puts the dealt rows into the result of the real operation; `source` is its input as it was before."""
    drawn.copy_(value)
    if operation in MASKED and source is not None:
        keep = 1.0 - args[1]
        plain(result[0]).copy_(source * value.to(source.dtype) / keep if keep > 0 else torch.zeros_like(source))
    elif operation.startswith("rrelu_with_noise") and source is not None:
        (result if isinstance(result, torch.Tensor) else result[0]).copy_(source * args[1])
    return result
