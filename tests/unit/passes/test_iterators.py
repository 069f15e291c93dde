"""Iterators that the user's code keeps start every pass where they stood, and are the user's own again in the end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gaverify.passes.isolation import ModelState, rewindable_iterators

COUNTER = itertools.count()


class Kept:
    """Keeps iterators in an attribute, in a slot, in a list and in its class."""

    __slots__ = ("__dict__", "slot")
    shared = itertools.count()

    def __init__(self) -> None:
        self.slot, self.attribute, self.entries = itertools.count(), itertools.count(), [itertools.count()]

    def read(self) -> list[int]:
        return [next(self.slot), next(self.attribute), next(self.entries[0]), next(self.shared)]


def _of_generator() -> Any:
    values = (value for value in range(9))
    return lambda: next(values)


def _of_default() -> Any:
    def read(values: Any = None, others: Any = None) -> tuple[int, int]:
        return next(values), next(others)

    read.__defaults__ = (itertools.count(), itertools.count())
    return read


def _shared() -> Any:
    """Two variables with one iterator."""
    one = other = itertools.count()
    return lambda: (next(one), next(other))


READERS = {
    "generator": _of_generator,
    "default": _of_default,
    "shared": _shared,
    "global": lambda: lambda: next(COUNTER),
    "partial": lambda: functools.partial(next, itertools.count()),
    "object": lambda: Kept().read,
    "end": lambda: functools.partial(next, iter(()), None),
}


@pytest.mark.parametrize("make", READERS.values(), ids=READERS.keys())
def test_a_restore_lets_iterators_repeat_their_values(make: Any) -> None:
    read = make()
    with rewindable_iterators():
        state = ModelState([], (read,))
        first = [read(), read()]
        state.restore()
        assert [read(), read()] == first
        later = ModelState([], (read,))
        third = read()
        later.restore()
        assert read() == third
        state.restore()
        assert read() == first[0]


def test_iterators_are_the_users_own_again() -> None:
    kept = Kept()
    before = [kept.slot, kept.attribute, kept.entries[0], Kept.shared]
    with rewindable_iterators():
        ModelState([], (kept.read,))
        assert kept.slot is not before[0]
    after = [kept.slot, kept.attribute, kept.entries[0], Kept.shared]
    assert all(one is other for one, other in zip(before, after, strict=True))


def _drawing() -> Iterator[torch.Tensor]:
    while True:
        yield torch.rand(())


def _computing() -> Iterator[torch.Tensor]:
    weight = torch.ones((), requires_grad=True)
    while True:
        yield weight * 2


@pytest.mark.parametrize("make", [_drawing, _computing])
def test_what_is_drawn_or_computed_is_not_repeated(make: Any) -> None:
    values = make()

    def read() -> torch.Tensor:
        return next(values)

    with rewindable_iterators():
        state = ModelState([], (read,))
        first = read()
        state.restore()
        assert read() is not first
