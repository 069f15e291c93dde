"""Calls of inner modules in the last update: recorded for each row, or replaced by the full batch's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from gaverify.audit.recording.calls import BackwardCall, ForwardCall, UpdateEnd
from gaverify.audit.recording.context import Recording
from gaverify.audit.recording.outputs import Outputs, PinnedModules


class ModuleListener:
    """Hands forwards and losses of the last update to what controls ask for.

    Args:
        recording: What listeners share.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.outputs: Outputs | None = None
        """Records what module calls return and are given back; None: nothing is recorded."""
        self.pinned_modules: PinnedModules | None = None
        """Replaces what they return; None: nothing is replaced."""

    def pin(self, call: ForwardCall) -> AbstractContextManager[None]:
        """Surrounds a forward in which calls are replaced."""
        if self.pinned_modules is None or not self._concerns(call):
            return nullcontext()
        return self.pinned_modules.listening(call.module, call.args, call.kwargs)

    def record(self, call: ForwardCall) -> AbstractContextManager[None]:
        """Surrounds a forward in which calls are recorded, with the replaced values where there are some."""
        if self.outputs is None or not self._concerns(call):
            return nullcontext()
        return self.outputs.listening(call.module, call.args, call.kwargs)

    def trace_loss(self, call: BackwardCall) -> None:
        """Looks at the graph behind a loss, while there is one."""
        if not self._recording.is_last_update:
            return
        # After the pass the graph is gone, and with it the lines that it keeps.
        if self.outputs is not None:
            call.origin = replace(
                call.origin,
                met=(*self.outputs.meetings(call.roots), *filter(None, [call.terms.loss_line])),
                inside=tuple(self.outputs.inside(call.roots)),
                custom=tuple(self.outputs.custom_functions(call.roots)),
            )
        if self.pinned_modules is not None:
            self.pinned_modules.note_differentiation(call.roots)

    def end_update(self, call: UpdateEnd) -> None:
        """Stores what was recorded."""
        recording, watch = self._recording, self._recording.watch
        if call.number != recording.job.updates:  # earlier updates only lead to the one that differs
            return
        if self.outputs is not None:
            recording.storage.tensors("outputs", self.outputs.forwards)
        if self.pinned_modules is not None:
            own_positions = {at: self.pinned_modules.own(watch.parameters(at)) for at in range(len(watch))}
            # The full-batch run stores what others are given; those store which gradients the pinned code makes itself.
            stored = self.pinned_modules.forwards if recording.job.source is None else own_positions
            recording.storage.tensors("pinned", stored)

    def _concerns(self, call: ForwardCall) -> bool:
        return call.trains and self._recording.is_last_update
