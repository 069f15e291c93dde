"""Updates: what is stored of their windows, and changes that a script makes itself between calls."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gaverify.audit.folders import COPY
from gaverify.audit.recording.bus import Bus
from gaverify.audit.recording.calls import BackwardCall, Differentiation, ForwardCall, Recording, StepCall, UpdateEnd
from gaverify.audit.recording.listeners.gradients import GradientListener
from gaverify.audit.recording.listeners.other_calls import ClipCall
from gaverify.audit.recording.storage import Update, addends_of, bytes_of, divisor_of
from gaverify.audit.recording.values import out_of_sight, place_in_group, plain
from gaverify.audit.recording.watching import StandIn, WatchedOptimizer
from gaverify.audit.same_data import ForwardInputs, StoredGradients
from gaverify.passes.wrappers import is_sharded
from gaverify.records.events import Ending, GradientCopies, Step
from gaverify.tracebacks import Place

GRACE = 2.0
"""Seconds that a script has after its last update for what belongs to it: `zero_grad`, `scheduler.step`, `update`."""


class UpdateListener:
    """Ends an update when something new begins, and the script after the last one.

    Args:
        recording: The objects that listeners share.
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


_SMALL_COPIES = 1 << 26
"""Bytes of the gradients of all updates up to which each update's are copied: as much as a run's sketches take."""


class WindowListener:
    """Stores what each step is made of, and opens the next window of its optimizer.

    Args:
        recording: The objects that listeners share.
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
        self.copies: GradientCopies | None = None
        """The copies for the steps of later runs; None before the first step that they could make."""
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
        if call.can_lead:
            self._copy(entry)
        self.had_gradients = self.had_gradients or not entry.is_cleared

    def note_result(self, call: StepCall) -> None:
        """Samples weights and buffers after a step; settings that it changed were not set by hand."""
        self._recording.unannounced.accept_settings()
        self._recording.watch.look()
        self._updates.open.capture_after_step(call.entry, self._recording.names.buffers(), call.was_led)

    def count_step(self, entry: WatchedOptimizer) -> None:
        """Counts a step of an optimizer."""
        self.steps += 1
        entry.steps += 1

    def store(self, entry: WatchedOptimizer, moved: torch.Tensor | None = None) -> None:
        """Stores what a step is made of, and opens the next window.

        Args:
            entry: The optimizer.
            moved: As for `Update.capture`.
        """
        job, update = self._recording.job, self._updates.open
        # Gradients that were cleared before the step, and used by another optimizer's step, belong to that one: a GAN's
        # generator loss also reaches the discriminator.
        entry.increments = [part for part in entry.increments if not (part.cleared and part.backward in self._used)]
        self._used |= {part.backward for part in entry.increments if not part.cleared}
        self.addends[entry.index] = addends_of(entry.sample.parameters)
        captured = update.capture(entry, self._updates.positions(sorted(entry.forwards)), moved)
        if self.stores_gradients and update.number <= max(job.updates, 1):
            divisor, left_out = divisor_of(entry), self._replicas(entry)
            stored = {kind: gradients.to_storage(divisor, left_out) for kind, gradients in captured.items()}
            self._write(entry, stored, max(job.updates, 1) - update.number + 1)
        entry.pending, entry.increments, entry.forwards = 0, [], set()
        entry.summed, entry.used = None, {}

    def _replicas(self, entry: WatchedOptimizer) -> list[int]:
        """Returns the places of the parameters that another rank stores: of replicas, those of rank 0 are read."""
        if not self.rank or self._recording.job.is_reference:
            return []
        return [at for at, parameter in enumerate(entry.sample.parameters) if not is_sharded(parameter.data)]

    def _write(self, entry: WatchedOptimizer, stored: dict[str, StoredGradients], updates_left: int) -> None:
        # Every rank writes its shards, on what may be the same disk.
        shared = self.ranks if any(map(is_sharded, entry.sample.parameters)) else 1
        storage = self._recording.storage
        tensors = [each for part in stored.values() for each in (*part.values.values(), *part.sketches.values())]
        storage.reserve(tensors, updates_left * shared)
        for kind, members in stored.items():
            storage.tensors(f"{kind}-{entry.index}-{entry.steps}", members)

    def _copy(self, entry: WatchedOptimizer) -> None:
        """Copies the gradients of a step, so that later runs can make the same one.

        Small ones are copied of every update; of large ones those of the first update alone, if they fit twice.
        """
        recording, number = self._recording, self._updates.open.number
        # The next update starts where this step leads: a single update needs no copy. All ranks follow rank 0's.
        if recording.job.updates < 2 or not recording.job.is_reference or self.rank:
            return
        if any(map(is_sharded, entry.sample.parameters)):  # which are never led
            return
        if self.copies is None:
            wanted, free = bytes_of(recording.watch.all_parameters()), recording.storage.free
            room = math.inf if free is None else free / 2  # the other half is the script's, and other runs'
            updates = recording.job.updates
            if wanted * updates > min(_SMALL_COPIES, room):
                updates = int(wanted <= room)
            self.copies = GradientCopies(updates, wanted, free or 0)
        if number <= self.copies.updates:
            divisor = divisor_of(entry)
            gradients = {
                at: gradient if divisor == 1.0 else gradient / divisor
                for at, parameter in enumerate(entry.sample.parameters)
                if parameter.grad is not None and (gradient := plain(parameter.grad)) is not None
            }
            recording.storage.tensors(f"{COPY}-{entry.index}-{entry.steps}", gradients)


# Changes that a script makes itself: of weights, gradients and settings between calls, and steps of its own.


_UNKEPT_MOVES = 2
"""Moves of weights by gradients that are kept nowhere, after which a run ends: one may be a new start."""


class ChangeListener:
    """Looks at weights and gradients whenever a call begins: the script itself made what changed since the last call.

    Where no optimizer of torch's is made before something is differentiated, the script steps itself.

    Args:
        recording: The objects that listeners share.
        gradients: Where passes wait that a step of the script's may have used.
        updates: The updates.
        windows: Where the windows of such steps are stored.
        undo: Restores the first weights, if a control undoes every step.
        finish: Ends the process.
    """

    def __init__(
        self,
        recording: Recording,
        gradients: GradientListener,
        updates: UpdateListener,
        windows: WindowListener,
        undo: Callable[[], None],
        finish: Callable[[Ending, int], None],
    ) -> None:
        self._recording, self._gradients, self._updates, self._windows = recording, gradients, updates, windows
        self._undo, self._finish = undo, finish
        self._unkept_moves = 0

    @property
    def keeps_no_gradients(self) -> bool:
        """Whether the script moves weights by gradients that no `.grad` holds at that time."""
        return self._unkept_moves >= (_UNKEPT_MOVES if self._windows.steps else 1)

    def settle(self) -> None:
        """Records the steps that the script has made itself since the last look."""
        if not self._recording.watch.has_stand_ins:
            return
        unannounced = self._recording.unannounced
        unannounced.end_hunt()
        look = self._recording.watch.look()
        for index, before in look.moved.items():
            self._record_step(self._recording.watch.of(index), before)
        unannounced.note(replace(look, moved={}), "between")

    def begin_forward(self, call: ForwardCall) -> None:
        """Records steps: weights that moved until now are one of the window that ends."""
        if call.trains:
            self.settle()

    def begin_differentiation(self, _: Differentiation) -> None:
        """Records steps, and lets each model without an optimizer have what stands for one."""
        self.settle()
        watch = self._recording.watch
        if len(watch) and not watch.has_stand_ins:
            return
        watched_ids = {id(parameter) for parameter in watch.all_parameters()}
        for model in self._recording.names.models:
            new = [each for each in model.parameters() if each.requires_grad and id(each) not in watched_ids]
            if new:
                watched_ids |= set(map(id, new))
                watch.of(watch.add(StandIn(new)))

    def note_settings(self, call: ForwardCall | BackwardCall) -> None:
        """Notes settings that were changed since the last pass: they belong to the update that is about to end."""
        if isinstance(call, BackwardCall) or call.trains:
            self._recording.unannounced.end_hunt()
            self._recording.unannounced.note_settings()

    def note_changes(self, call: ForwardCall | BackwardCall) -> None:
        """Notes what was done since the last call: it belongs to the update that has begun."""
        if isinstance(call, BackwardCall) or call.trains:
            look = self._recording.watch.look()
            self._recording.unannounced.note(look, "between")
            self._recording.unannounced.note_edits(look)

    def hunt(self, call: Differentiation | ClipCall) -> None:
        """Looks for the lines of further changes, until the next call."""
        if not isinstance(call, BackwardCall) or call.is_counted:
            self._recording.unannounced.hunt(self._has_changes)

    def _has_changes(self, place: Place) -> bool:
        """Whether a line has changed something, and no later line is of interest."""
        if out_of_sight():
            return False
        watch, unannounced = self._recording.watch, self._recording.unannounced
        with self._recording.guard.work():
            if not watch.has_stand_ins:
                return unannounced.has_changes()
            # Each line may move one parameter, whose gradient the next line clears.
            if any([entry.keep_used() for entry in watch]):
                unannounced.moving_line = unannounced.moving_line or place
            return False

    def _record_step(self, entry: WatchedOptimizer, before: torch.Tensor) -> None:
        journal, windows, updates = self._recording.journal, self._windows, self._updates
        self._gradients.count_waiting(entry)
        if not entry.increments:
            return  # nothing was differentiated: weights that were loaded, say
        if entry.summed is None or any(part.cleared for part in entry.increments):
            # The weights' change alone is seen, in which a rate, a division or Adam hides the gradient's size.
            self._unkept_moves += 1
            entry.pending, entry.increments = 0, []
            if self._unkept_moves >= _UNKEPT_MOVES:
                self._finish(Ending.UNKEPT, 0)
            return
        windows.had_gradients = True
        # A second step of the same weights begins an update of its own, as it does with an optimizer.
        if entry.index in updates.open.steps:
            updates.close()
        windows.count_step(entry)
        stamp = journal.stamp(self._recording.unannounced.moving_line or (None, None))
        journal.add(Step(*stamp, optimizer=entry.index, by_hand=True))
        windows.store(entry, before)
        updates.open.capture_after_step(entry, self._recording.names.buffers(), led=False)
        self._undo()
        self._recording.watch.look()
        updates.end_if_complete()
