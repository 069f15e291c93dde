"""Comparable summaries of whatever state may consist of."""

from __future__ import annotations

import random
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from gaverify.passes.devices import widest
from gaverify.passes.fingerprints import real_numbers, summaries
from gaverify.passes.isolation import BYTES, CONTAINERS, UNSET, attributes_of, entries_of, numpy_types, slots_of

_MOST = 1_000  # entries of one container that are looked at
_ALL = 10_000  # values that are looked at in all
_BYTES = 1 << 20  # of an array that are hashed
_DEPTH = 6


def digest(value: Any) -> Any:
    """Returns a comparable summary of a value: numbers as they are, tensors by projections, containers by entries.

    None for what is no state, or none of its own: modules, functions, classes, random generators; and for a value that
    raises when it is looked at, so that it does not hide the others.
    """
    try:
        return _Summary().of(value, 0)
    except Exception:
        return None


class _Summary:
    """One walk through a value."""

    def __init__(self) -> None:
        self._left = _ALL

    def of(self, value: Any, depth: int) -> Any:
        if isinstance(value, int | float | str | bool | complex | type(None)):
            return value
        self._left -= 1
        if depth > _DEPTH or self._left < 0:
            return None
        if isinstance(value, torch.Tensor):
            return tensor_digest(value) if not isinstance(value, nn.Parameter) else None
        if isinstance(value, nn.Module | FunctionType | MethodType | type):
            return None
        ndarray, generators = numpy_types()
        if isinstance(value, (random.Random, *generators)) or type(value).__module__.startswith("torch"):
            return None
        if isinstance(value, (*BYTES, ndarray)):
            return self._bytes(value, depth)
        if isinstance(value, (*CONTAINERS, tuple, frozenset)):
            return self._container(value, depth)
        return self._object(value, depth)

    def _container(self, value: Any, depth: int) -> tuple[Any, ...]:
        if isinstance(value, set | frozenset):
            return (type(value).__name__, len(value), hash(frozenset(value)) if len(value) <= _MOST else 0)
        keys = tuple(map(str, entries_of(value, _MOST))) if isinstance(value, dict) else ()
        entries = entries_of(value, _MOST, values=True)
        return (type(value).__name__, len(value), *keys, *(self.of(entry, depth + 1) for entry in entries))

    def _object(self, value: Any, depth: int) -> Any:
        held = {slot.__name__: entry for slot, entry in slots_of(value) if entry is not UNSET}
        held |= attributes_of(value) or {}
        return self._container(held, depth + 1) if held else None

    def _bytes(self, value: Any, depth: int) -> tuple[Any, ...]:
        """Of a bytearray, an `array.array` or a NumPy array: its shape and a hash of its values."""
        if not hasattr(value, "dtype"):
            return (len(value), hash(bytes(memoryview(value).cast("B")[:_BYTES])))
        flat = value.ravel()
        if value.dtype.hasobject:
            return (*value.shape, *(self.of(entry, depth + 1) for entry in flat[:_MOST].tolist()))
        return (*value.shape, hash(flat[: _BYTES // max(1, value.itemsize)].tobytes()))


def tensor_digest(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns the shape of a tensor, its sum, two projections and its norm."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    flat = real_numbers(tensor).reshape(-1).to(widest(tensor.device))
    return (tuple(tensor.shape), *torch.cat([flat.sum().unsqueeze(0), summaries(flat)]).tolist())
