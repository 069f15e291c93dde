"""Iterators and generators that the user's code keeps: their values are recorded, so that a pass can read them again.

Python lets nobody copy or rewind a generator. While a verification runs, a stand-in takes the place of each iterator
that the loss can reach; it repeats the recorded values after a restore and asks the iterator only for later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gaverify.passes.isolation.generators import foreign_generator_states, torch_generator_states
from gaverify.torch_internals import tree_leaves

# For each open verification: the stand-ins by the identity of their iterators, and what puts the iterators back
_scopes: list[tuple[dict[int, RewindableIterator], list[Callable[[], None]]]] = []


@contextmanager
def rewindable_iterators() -> Iterator[None]:
    """Lets stand-ins take the place of iterators until the end, when every iterator is put back where it was."""
    _scopes.append(({}, []))
    try:
        yield
    finally:
        for put_back in reversed(_scopes.pop()[1]):
            put_back()


class RewindableIterator:
    """Stands in for an iterator, and repeats its values after `position` was set back.

    Values that were drawn at random, or computed from weights, are of one pass: from the first of these on, nothing is
    recorded and nothing repeated.
    """

    __slots__ = ("_iterator", "_position", "_values")

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._values: list[Any] | None = []
        self._position = 0

    @property
    def position(self) -> int | None:
        """How many values have been read; None where they cannot be repeated."""
        return self._position if self._values is not None else None

    def rewind(self, position: int | None) -> None:
        """Lets the next value be the one after `position` values."""
        if position is not None and self._values is not None:
            self._position = min(position, len(self._values))

    def __iter__(self) -> RewindableIterator:
        return self

    def __next__(self) -> Any:
        values = self._values
        if values is None:
            return next(self._iterator)
        if self._position == len(values):
            before = _random_states()
            value = next(self._iterator)
            if _is_computed(value) or _random_states() != before:
                self._values = None
                return value
            values.append(value)
        self._position += 1
        return values[self._position - 1]

    def send(self, value: Any) -> Any:
        """Sends a value to a generator, whose answer may depend on it: from here on nothing is repeated."""
        if value is None:
            return next(self)
        self._values = None
        return self._iterator.send(value)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_iterator"), name)


def _random_states() -> tuple[Any, ...]:
    return (*torch_generator_states(), *foreign_generator_states())


def _is_computed(value: Any) -> bool:
    """Whether a backward would go through the value: a second one would find its graph freed."""
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(value))


def replace_iterators(places: Iterable[tuple[Any, Any]], bind: Callable[[Any, Any], None]) -> None:
    """Puts stand-ins in the place of iterators; does nothing outside a verification.

    Args:
        places: Places (names, cells, indices) and what is there.
        bind: Puts another value in a place.
    """
    if not _scopes:
        return
    stand_ins, put_back = _scopes[-1]
    for place, value in list(places):
        if _is_iterator(value):
            # one stand-in for each iterator: two variables that share it go on together
            bind(place, stand_ins.setdefault(id(value), RewindableIterator(value)))
            put_back.append(partial(bind, place, value))


def _is_iterator(value: Any) -> bool:
    """Whether `value` is a generator, or an iterator of Python's own: objects of other classes have attributes."""
    kind = type(value)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
