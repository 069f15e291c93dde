"""Collectives of backward passes, and gathers of trained tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from gaverify.audit.recording.calls import BackwardCall
from gaverify.audit.recording.context import Recording
from gaverify.collective.traffic import TrafficMeter
from gaverify.records.ranks import Collective
from gaverify.tracebacks import Place, user_place


class TrafficListener:
    """Measures what each backward pass sends.

    Args:
        recording: What listeners share.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._meter = TrafficMeter()
        self.differentiates_gathers = False
        """Whether gathers of trained tensors pass the gradient back, for a control."""
        self._gathers: list[Place | None] = []

    def note_gather(self) -> None:
        """Notes that a tensor that needs a gradient is gathered from all ranks."""
        if not self._recording.guard.off:
            self._gathers.append(user_place())

    def begin(self, _: BackwardCall) -> None:
        """Begins to count."""
        self._meter = TrafficMeter()

    def count(self, _: BackwardCall) -> AbstractContextManager[None]:
        """Surrounds a backward pass."""
        return self._meter.counting() if self._recording.job.is_launched else nullcontext()

    def describe(self, call: BackwardCall) -> None:
        """Describes what a pass that counts has sent."""
        if not call.is_counted:
            return
        for dtype in self._meter.reduced_in:  # a reduction in half precision rounds as a product does
            self._recording.roundoff.arithmetic.dtypes.add(dtype)
        # Gathers of a pass that does not count belong to the next one that does.
        call.gathers, self._gathers = self._gathers, []
        if self._recording.job.has_ranks:
            sizes = self._meter.sizes
            call.traffic, call.reduced = self._meter.traffic, sizes[Collective.REDUCE] + sizes[Collective.SCATTER]
