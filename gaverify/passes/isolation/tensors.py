"""The values of tensors: small ones are copied at once, parameters and large ones when something would write to them.

A copy of a large model would double its memory for the rare forward that writes to its parameters
(`Embedding(max_norm=…)`, weight clipping, an optimizer step in a hook), so those wait for `before_write`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

Restore = Callable[[], None]
# Elements of a tensor that is copied only before a write. A write is seen by the operation's schema. Only fused
# normalisations write to running statistics without saying so, and those are far smaller.
_LARGE = 1 << 20


class Tensors:
    """Saves the tensors that were found: memory, values, flags and gradients.

    Args:
        waits: Whether parameters and large tensors are copied only when something writes to them.
    """

    def __init__(self, *, waits: bool = True) -> None:
        self._waits = waits
        self._restorers: list[Restore] = []
        self._waiting: dict[int, list[torch.Tensor]] = {}
        self._written: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}

    @property
    def written_tensors(self) -> tuple[torch.Tensor, ...]:
        """The waiting tensors that something has written to."""
        return tuple(tensor for entries in self._written.values() for tensor, _, _ in entries)

    def keep(self, tensor: torch.Tensor, *, wait: bool, gradient: bool) -> None:
        """Keeps what `tensor` is bound to and its value.

        Args:
            tensor: Any but a lazy one.
            wait: Whether a large one may wait for `before_write`; a parameter always does.
            gradient: Keep its `.grad` as well (those of the model's own parameters belong to the passes).
        """
        data = tensor.data
        self._restorers.append(_binding(tensor, data))
        if gradient and tensor.requires_grad and tensor.is_leaf:
            self._restorers.append(_gradient(tensor))
        pointer = storage(tensor)
        # A copy of every parameter would double the memory of the model, and few forwards write to one.
        waits = isinstance(tensor, nn.Parameter) or (wait and tensor.numel() > _LARGE)
        if pointer and self._waits and waits:
            self._waiting.setdefault(pointer, []).append(tensor)
        else:
            self._restorers.append(_value_of(tensor))

    def before_write(self, tensor: torch.Tensor) -> None:
        """Keeps the values of the waiting tensors that share storage with `tensor`, before they change."""
        pointer = storage(tensor) if self._waiting else 0
        # several may lie in one storage: flattened parameters, the weights of a recurrent network on CUDA
        waiting = self._waiting.get(pointer) if pointer else None
        if waiting is not None and pointer not in self._written:
            waiting_entries = [(waits, waits.data) for waits in waiting if storage(waits) == pointer]
            self._written[pointer] = [(waits, data, data.clone()) for waits, data in waiting_entries]

    @property
    def restorers(self) -> list[Restore]:
        """Puts bindings and values back, in place, so that ties and outside references survive."""
        return [*self._restorers, self._restore_written]

    def _restore_written(self) -> None:
        for entries in self._written.values():
            for _, data, value in entries:
                data.copy_(value)


def storage(tensor: torch.Tensor) -> int:
    """Returns the address of the memory that a tensor lies in, 0 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse and lazy tensors, some subclasses
        return 0


def _binding(tensor: torch.Tensor, data: torch.Tensor) -> Restore:
    """Puts a tensor back onto its memory (`p.data = new`, a resize, a move), with its flag and without a graph."""
    place, flag, plain = _place(data), tensor.requires_grad, tensor.is_leaf and tensor._base is None

    def restore() -> None:
        # A tensor with a graph refuses new data.
        if plain and tensor.grad_fn is not None:
            tensor.detach_()  # written in place with gradients enabled
        if place is None or _place(tensor) != place:
            tensor.data = data
        # Torch lets only leaves change their flag.
        if tensor.requires_grad != flag and tensor.is_leaf:
            tensor.requires_grad_(flag)

    return restore


def _place(tensor: torch.Tensor) -> Any:
    """Tells one memory layout from another; None where a tensor is no plain array."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except (NotImplementedError, RuntimeError):
        return None


def _value_of(tensor: torch.Tensor) -> Restore:
    return _values(tensor.data) if tensor.layout is torch.strided else _sparse_value(tensor)


def _values(data: torch.Tensor) -> Restore:
    if not data.is_quantized and 0 in data.stride():
        # an expanded tensor has several indices for one place and cannot be written to as a whole
        sizes = [1 if stride == 0 else size for size, stride in zip(data.shape, data.stride(), strict=True)]
        data = data.as_strided(sizes, data.stride(), data.storage_offset())
    value = data.clone()
    inference = data.is_inference()

    def restore() -> None:
        # A tensor made in inference mode can be written to only there.
        with torch.inference_mode() if inference else nullcontext():
            data.copy_(value)

    return restore


def _sparse_value(tensor: torch.Tensor) -> Restore:
    """Puts back a sparse tensor, whose indices and values are exchanged when it is written to in place."""
    value = tensor.detach().clone()

    def restore() -> None:
        tensor.data = value.clone()

    return restore


def _gradient(tensor: torch.Tensor) -> Restore:
    gradient = tensor.grad
    put_back = _value_of(gradient) if gradient is not None else None

    def restore() -> None:
        # The object first, then its value: a pass may have put another tensor in its place, or written to it.
        tensor.grad = gradient
        if put_back is not None:
            put_back()

    return restore


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Returns position and name of the arguments that an operation of torch writes to, `out=` included."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that a call of an operation will write to, those in lists (`_foreach_mul_`) included."""
    tensors = []
    for position, name in written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        entries = value if isinstance(value, list | tuple) else (value,)
        tensors += [entry for entry in entries if isinstance(entry, torch.Tensor)]
    return tensors
