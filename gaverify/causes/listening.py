"""What a diagnosis hears of the float64 control, whose micro-batches it would have to run again otherwise."""

from __future__ import annotations

from dataclasses import replace

import torch

from gaverify.causes.earlier import Earlier
from gaverify.causes.sketches import shares_of
from gaverify.passes.gradients import AfterBackward, PassProbe, PassResult
from gaverify.passes.isolation import ModelState
from gaverify.passes.sketches import sketch
from gaverify.passes.task import Task


class Heard:
    """Watches the state through the micro-batches, and keeps a sketch of the gradient after each of them."""

    def __init__(self) -> None:
        self._watch: PassProbe | None = None
        self._sums: list[torch.Tensor] = []

    def begin(self, task: Task, state: ModelState) -> tuple[PassProbe, AfterBackward]:
        """Returns what watches, and what sketches."""
        from gaverify.causes.trace.state import StateWatch  # an equivalent verdict does not wait for this import

        watch = StateWatch(task, state)
        self._watch, self._sums = watch, []

        def note(_: int) -> None:
            self._sums.append(sketch([parameter.grad for parameter in task.parameters.values()]))

        return watch, note

    def forget(self) -> None:
        """Drops what was heard."""
        self._watch, self._sums = None, []

    def added_to(self, earlier: Earlier, accumulated: PassResult) -> Earlier:
        """Returns the earlier pass with its micro-batches, where all of them were heard."""
        if self._watch is None or len(self._sums) != len(accumulated.weights):
            return earlier
        shares = shares_of(self._sums, earlier.gradient, accumulated.weights, earlier.elements)
        return replace(earlier, watch=self._watch, shares=shares)
