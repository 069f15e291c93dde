"""One forward of the full batch before both runs: what initialises itself from the first batch is initialised then.

Shapes: B samples in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _disable_current_modes

from gaverify.passes.batching import fresh
from gaverify.passes.dispatch import PassMode
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import ModelState, generator_states
from gaverify.passes.randomness import Recorder
from gaverify.passes.task import Task, loss_of


class Primed(PassProbe):
    """Runs the full batch forward before the full batch's pass and before the first micro-batch.

    What it changes stays for the pass and is restored with the rest of the state at its end; its draws are its own.
    """

    def __init__(self, task: Task, state: ModelState, *, lift: bool) -> None:
        self._task, self._state, self._lift = task, state, lift

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Runs it where a strategy starts."""
        if k in (None, 0):
            restore = generator_states()
            mode = PassMode(self._state, Recorder(), lift=self._lift)
            with _disable_current_modes(), mode:
                loss_of(self._task, fresh(self._task.problem.batch), "the full batch")
            restore()
        yield
