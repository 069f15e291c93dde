"""Finds out, cheaply, whether a script draws random numbers in its loop: did a generator move outside the forwards?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gaverify.passes.isolation.generators import foreign_generator_states, torch_generator_states


class WatchedDraws:
    """Compares the generators' states after every call that may draw with those before the next.

    Only torch's are asked every time: the states of Python's and NumPy's take a hundred microseconds, so that these are
    compared once, at the end, whoever drew from them.
    """

    def __init__(self) -> None:
        self.moved = False
        self.count = 0
        self.unaligned: dict[str, str] = {}
        self._started = False
        self._states: list[bytes] = []
        self._others: tuple[Any, ...] = ()
        self._paused = 0

    def start(self) -> None:
        """Starts to watch."""
        if not self._started:
            self._started, self._states, self._others = True, torch_generator_states(), foreign_generator_states()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds what is not the loop's own: a forward, a backward, a step, a loader."""
        watches = self._started and not self.moved and not self._paused
        if watches and torch_generator_states() != self._states:
            self.moved = True
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            if watches:
                self._states = torch_generator_states()

    def forward(self, rows: int | None) -> None:
        """Nothing to note."""

    def after_backward(self) -> None:
        """Nothing to note."""

    def after_step(self) -> None:
        """Nothing to note."""

    def close(self) -> None:
        """Looks at the generators that were not watched."""
        self.moved = self.moved or (self._started and foreign_generator_states() != self._others)
