"""Updates: optimizer steps with no forward or backward pass between them, and what is stored of their windows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gaverify.audit.measurements import ForwardInputs
from gaverify.audit.recording.bus import Bus
from gaverify.audit.recording.calls import BackwardCall, ForwardCall, StepCall, UpdateEnd
from gaverify.audit.recording.context import Recording
from gaverify.audit.recording.storage import Update, addends_of, shards_alone
from gaverify.audit.recording.values import place_in_group
from gaverify.audit.recording.watching import Watched
from gaverify.passes.wrappers import is_sharded
from gaverify.records.events import Step

GRACE = 2.0
"""Seconds that a script has after its last update for what belongs to it: `zero_grad`, `scheduler.step`, `update`."""


class UpdateListener:
    """Ends an update when something new begins, and the script after the last one.

    Args:
        recording: What listeners share.
        bus: Where the end of an update is announced.
        stop: Ends the process.
    """

    def __init__(self, recording: Recording, bus: Bus, stop: Callable[[], None]) -> None:
        self._recording, self._bus, self._stop = recording, bus, stop
        self._is_complete = False
        self._rows: dict[int, tuple[int, int]] = {}  # by forward: its update, and its position in it
        self.open = Update(1)
        """The update that is worked on."""

    def add_rows(self, forward: int, inputs: ForwardInputs) -> None:
        """Keeps the fingerprints of a forward's inputs until the update ends."""
        self._rows[forward] = self.open.number, len(self.open.rows)
        self.open.rows.append(inputs)

    def positions(self, forwards: Sequence[int]) -> list[tuple[int, int]]:
        """Returns where the rows of forwards are stored: their update, and their position in it."""
        return [self._rows[forward] for forward in forwards]

    def begin_pass(self, call: ForwardCall | BackwardCall) -> None:
        """Ends the update whose steps have been made: a forward or backward pass belongs to the next one."""
        if isinstance(call, BackwardCall) or call.trains:
            self._end()

    def begin_step(self, call: StepCall) -> None:
        """Ends the update in which the same optimizer has stepped already."""
        if call.entry.index in self.open.steps:
            self._end()

    def close(self) -> None:
        """Writes an update whose steps have been made."""
        recording, number = self._recording, self.open.number
        if not self.open.steps:  # micro-batches follow each other without a step
            return
        if recording.job.role != "events":
            steps = {at: recording.watch.of(at).steps for at in self.open.steps}
            self.open.write(recording.storage, steps)
        self._bus.end(UpdateEnd(number))
        self.open, recording.journal.update = Update(number + 1), number + 1

    def end_if_complete(self, _: StepCall | None = None) -> None:
        """Sees to it that the script ends soon if it has made all updates that were asked for."""
        wanted = self._recording.job.updates
        if wanted and self.open.number >= wanted and not self._is_complete:
            self._is_complete = True
            timer = threading.Timer(GRACE, self._stop)
            timer.daemon = True  # a script that ends by itself does not wait for it
            timer.start()

    def _end(self) -> None:
        if self._is_complete:
            self._stop()
        self.close()


class WindowListener:
    """Stores what each step is made of, and opens the next window of its optimizer.

    Args:
        recording: What listeners share.
        updates: The updates.
    """

    def __init__(self, recording: Recording, updates: UpdateListener) -> None:
        self._recording, self._updates = recording, updates
        self._used: set[int] = set()  # backward passes that a step has used
        self.stores_gradients = recording.job.role != "events"
        """Whether the gradients of the updates that were asked for are stored."""
        self.steps = 0
        """Steps so far, of any optimizer."""
        self.addends: dict[int, dict[int, int]] = {}
        """For each optimizer, as at its last step, what `addends_of` tells of its gradients."""
        self.had_gradients = False
        """Whether any step had something to use."""
        self.by_change = False
        """Whether the change of the weights stood for the gradient of any step."""
        self.rank, self.ranks = 0, 1

    def record(self, call: StepCall) -> None:
        """Writes a step that is about to be made."""
        recording, entry = self._recording, call.entry
        look = recording.watch.look()
        recording.unannounced.note(look, recording.phase.outside_forwards)
        self.count_step(entry)
        by_hand, stamp = entry.index in look.changed, recording.journal.stamp(call.place)
        recording.journal.add(Step(*stamp, optimizer=entry.index, inside=recording.phase.in_backward, by_hand=by_hand))
        self.rank, self.ranks = max((self.rank, self.ranks), place_in_group(), key=lambda place: place[1])
        self.store(entry)
        self.had_gradients = self.had_gradients or not entry.is_cleared

    def note_result(self, call: StepCall) -> None:
        """Samples weights and buffers after a step; settings that it changed were not set by hand."""
        self._recording.unannounced.accept_settings()
        self._recording.watch.look()
        self._updates.open.capture_after_step(call.entry, self._recording.names.buffers(), call.was_led)

    def count_step(self, entry: Watched) -> None:
        """Counts a step of an optimizer."""
        self.steps += 1
        entry.steps += 1

    def store(self, entry: Watched, moved: torch.Tensor | None = None, change: Any = None) -> None:
        """Stores what a step is made of, and opens the next window.

        Args:
            entry: The optimizer.
            moved: As for `Update.capture`.
            change: As for `Update.capture`.
        """
        job, update = self._recording.job, self._updates.open
        # What was cleared before the step and used by another optimizer's is that one's: a GAN's generator loss also
        # reaches the discriminator.
        entry.increments = [part for part in entry.increments if not (part.cleared and part.backward in self._used)]
        self._used |= {part.backward for part in entry.increments if not part.cleared}
        self.addends[entry.index] = addends_of(entry.sample.parameters)
        tensors = update.capture(entry, self._updates.positions(sorted(entry.forwards)), moved, change)
        if self.rank and not job.is_reference:
            tensors = shards_alone(tensors, entry.sample.parameters)  # of replicas, those of rank 0 are read
        if self.stores_gradients and update.number <= max(job.updates, 1):
            self._write(entry, tensors, max(job.updates, 1) - update.number + 1)
        entry.pending, entry.increments, entry.forwards = 0, [], set()
        entry.summed = entry.used = None

    def _write(self, entry: Watched, tensors: dict[str, dict[int, torch.Tensor]], updates_left: int) -> None:
        # Every rank writes its shards, on what may be the same disk.
        shared = self.ranks if any(map(is_sharded, entry.sample.parameters)) else 1
        storage = self._recording.storage
        storage.reserve((value for members in tensors.values() for value in members.values()), updates_left * shared)
        for kind, members in tensors.items():
            storage.tensors(f"{kind}-{entry.index}-{entry.steps}", members)
