"""What the graph and the loss functions tell of a loss: its weight, divisor and value, and the targets it counts."""

from __future__ import annotations

from gaverify.audit.recording.calls import BackwardCall
from gaverify.audit.recording.context import Recording
from gaverify.audit.recording.graph import Weight
from gaverify.audit.recording.listeners.other_calls import TargetListener


class LossListener:
    """Reads the weight of each loss while it is differentiated.

    Args:
        recording: What listeners share.
        targets: Counts the targets of the losses.
    """

    def __init__(self, recording: Recording, targets: TargetListener) -> None:
        self._job, self._targets = recording.job, targets
        self._weight = Weight()

    def begin(self, call: BackwardCall) -> None:
        """Listens to the gradients of the numbers that the loss was made from."""
        # Repetitions of the full-batch run are read for their gradients alone.
        if self._job.role != "full" or self._job.is_reference:
            self._weight.begin(call.roots)

    def end(self, call: BackwardCall) -> None:
        """Stops listening."""
        call.weight = self._weight.end()

    def describe(self, call: BackwardCall) -> None:
        """Describes the loss of a pass that counts; its targets are those since the last such pass."""
        if not call.is_counted:
            return
        call.targets = self._targets.read()
        self._targets.clear()
        # Targets tell what a mean over them is divided by; a sum of losses may be divided by anything.
        call.divisor = self._weight.divisor if self._weight.of_a_sum or not call.targets else None
        call.scales, call.loss = self._weight.scales, self._weight.value_of(call.roots)
