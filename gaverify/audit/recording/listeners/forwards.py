"""Forwards of models: their rows, the forwards that backward passes reach later, and what they draw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gaverify.audit.recording.calls import ForwardCall
from gaverify.audit.recording.context import Recording
from gaverify.audit.recording.listeners.updates import UpdateListener
from gaverify.audit.recording.rows import input_rows, input_shapes
from gaverify.audit.recording.samples import has_loss
from gaverify.audit.recording.values import OutOfSight
from gaverify.records.events import Forward


class ForwardListener:
    """Numbers and records the forwards of outermost modules with something to train.

    Args:
        recording: What listeners share.
        updates: Where the rows of forwards are kept.
    """

    def __init__(self, recording: Recording, updates: UpdateListener) -> None:
        self._recording, self._updates = recording, updates
        self._count = 0
        self.returns_loss = True
        """Whether every forward whose operations are differentiated returned a loss."""

    def identify(self, call: ForwardCall) -> None:
        """Finds out whether the module trains."""
        try:
            call.trains = call.is_graded and self._recording.names.add(call.module)
        except OutOfSight:  # a lazy module, or one on the meta device: the report says that it was left out
            self._recording.guard.leave_out("modules without values")

    def note_arithmetic(self, call: ForwardCall) -> None:
        """Looks at the precision of the module's parameters, and at autocast."""
        if call.trains:
            self._recording.roundoff.add(call.module)

    def record(self, call: ForwardCall) -> None:
        """Writes the forward, and keeps the fingerprints of its rows."""
        if not call.trains:
            return
        self._count += 1
        call.number, call.model = self._count, self._recording.names.index(call.module)
        call.shapes = input_shapes(call.args, call.kwargs)
        rows = next((shape[0] for shape in call.shapes), None)  # of the first tensor: masks may come behind it
        journal = self._recording.journal
        journal.add(Forward(*journal.stamp(), rows=rows, model=call.model, number=call.number))
        # An audit of calls alone compares no data.
        call.inputs = input_rows(call.args, call.kwargs) if self._recording.job.role != "events" else {}
        self._updates.add_rows(call.number, call.inputs)

    @contextmanager
    def run(self, call: ForwardCall) -> Iterator[None]:
        """Surrounds the forward; what it changes in weights and gradients, it changes although it raises."""
        recording = self._recording
        recording.phase.in_forward = True
        try:
            yield
        finally:
            recording.phase.in_forward = False
            if call.trains:
                with recording.guard.work():
                    recording.unannounced.note(recording.watch.look(), "forward")

    def note_result(self, call: ForwardCall) -> None:
        """Looks whether the forward returned a loss."""
        self.returns_loss = self.returns_loss and (not call.is_graded or has_loss(call.result))

    def is_inside(self) -> bool:
        """Whether a forward is running, or recomputed; inner modules tell whether autocast is on."""
        phase, roundoff = self._recording.phase, self._recording.roundoff
        if phase.in_forward and roundoff.open:
            roundoff.look_at_autocast()
        return phase.in_forward or phase.in_backward
