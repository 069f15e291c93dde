"""What a diagnosis hears of the float64 control, whose micro-batches it would have to run again otherwise."""

from __future__ import annotations

from dataclasses import replace

from gaverify.causes.sketches import Earlier, Sums
from gaverify.passes.gradients import AfterBackward, PassProbe, PassResult
from gaverify.passes.isolation import ModelState
from gaverify.passes.task import Task


class Heard:
    """Watches the state through the micro-batches, and keeps a sketch of the gradient after each of them."""

    def __init__(self) -> None:
        self._heard: tuple[PassProbe, Sums] | None = None

    def begin(self, task: Task, state: ModelState) -> tuple[PassProbe, AfterBackward]:
        """Returns what watches the state through the micro-batches, and what sketches."""
        from gaverify.causes.trace.state import StateWatch  # an equivalent verdict does not wait for this import

        watch, sums = self._heard = StateWatch(task, state), Sums(task)
        return watch, sums.note

    def forget(self) -> None:
        """Drops what was heard."""
        self._heard = None

    def added_to(self, earlier: Earlier, accumulated: PassResult) -> Earlier:
        """Returns the earlier pass with its micro-batches, where they were heard."""
        if self._heard is None:
            return earlier
        watch, sums = self._heard
        return replace(earlier, watch=watch, shares=sums.shares(earlier.gradient, accumulated.weights))
