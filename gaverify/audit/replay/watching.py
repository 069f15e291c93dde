"""Finds out, cheaply, whether a script draws random numbers in its loop: did a generator move outside the forwards?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gaverify.passes.isolation.generators import foreign_generator_states, torch_generator_states


class Loop:
    """Compares the generators' states after every call that the recorder sees with those before the next.

    Only torch's are asked every time: the states of Python's and NumPy's take a hundred microseconds, so that these are
    compared once, at the end, whoever drew from them. Nothing is seen before the first optimizer is made: weights and
    data sets are drawn before, and alike in all runs.
    """

    def __init__(self) -> None:
        self.steps = self.backwards = 0
        self.unaligned: dict[str, str] = {}
        self.moved = False
        self.count = 0  # draws that were kept, or given the full-batch run's
        self._started = False
        self._paused = 0
        self._states: list[bytes] = []
        self._others: tuple[Any, ...] = ()

    def start(self) -> None:
        """Starts to look on, for good."""
        if not self._started:
            self._started = True
            self._open()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds what is not the loop's own: a forward, a backward, a step, a loader."""
        off = self._started and not self._paused and self._pause()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            if off:
                self._resume()

    def forward(self, rows: int | None) -> None:
        """A forward of so many rows begins."""

    def after_backward(self) -> None:
        """A backward pass is over."""
        self.backwards += 1

    def after_step(self) -> None:
        """An optimizer has stepped."""
        self.steps += 1

    def close(self) -> None:
        """The run is over: looks at the generators that were not watched."""
        self.moved = self.moved or (self._started and foreign_generator_states() != self._others)

    def _open(self) -> None:
        self._others = foreign_generator_states()
        self._resume()

    def _pause(self) -> bool:
        """Ends a stretch of the loop; tells whether it goes on later."""
        self.moved = self.moved or torch_generator_states() != self._states
        return not self.moved

    def _resume(self) -> None:
        self._states = torch_generator_states()
