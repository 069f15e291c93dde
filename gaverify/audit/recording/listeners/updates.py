"""Updates: what is stored of their windows, and changes that a script makes itself between calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gaverify.audit.recording.bus import Bus
from gaverify.audit.recording.calls import BackwardCall, Differentiation, ForwardCall, Recording, StepCall, UpdateEnd
from gaverify.audit.recording.listeners.gradients import GradientListener
from gaverify.audit.recording.storage import Update, addends_of, shards_alone
from gaverify.audit.recording.unannounced import CERTAIN, ByHand, UnannouncedSteps
from gaverify.audit.recording.values import out_of_sight, place_in_group
from gaverify.audit.recording.watching import Watched
from gaverify.audit.same_data import ForwardInputs
from gaverify.passes.wrappers import is_sharded
from gaverify.records.events import ClearedByHand, Ending, Step
from gaverify.tracebacks import Place

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


# Changes that a script makes itself: of weights, gradients and settings between calls, and steps by hand.


class HandListener:
    """Looks at weights and gradients whenever a call begins: the script itself made what changed since the last call.

    Args:
        recording: What listeners share.
        gradients: Where passes wait that a step by hand may have used.
        updates: The updates.
        windows: Where the windows of steps by hand are stored.
        finish: Ends the process.
    """

    def __init__(
        self,
        recording: Recording,
        gradients: GradientListener,
        updates: UpdateListener,
        windows: WindowListener,
        finish: Callable[[Ending, int], None],
    ) -> None:
        self._recording, self._gradients, self._updates, self._windows = recording, gradients, updates, windows
        self._finish = finish
        self._steps = UnannouncedSteps()
        self.is_expected = False
        """Whether moved weights are the script's steps: it has no optimizer of torch's."""
        self.undoes_steps = False
        """Whether every step is undone, those of optimizers as well."""

    @property
    def has_moved_weights(self) -> bool:
        """Whether weights moved after differentiations, and no optimizer stepped."""
        return not self._windows.steps and self._steps.moves > 0

    def expect_steps(self) -> None:
        """Counts each change of the weights as a step: the script has no optimizer of torch's."""
        self.is_expected = True
        self._recording.unannounced.hunt_always()

    def settle(self) -> None:
        """Records the steps that the script has made itself since the last look."""
        if not self.is_expected:
            return
        unannounced = self._recording.unannounced
        unannounced.end_hunt()
        look = self._recording.watch.look()
        for index, before in look.moved.items():
            self._record_step(self._recording.watch.of(index), before)
        unannounced.note(replace(look, moved={}), "between")

    def begin_forward(self, call: ForwardCall) -> None:
        """Records steps; looks whether the script moves its weights itself, and what no optimizer holds."""
        if not call.trains:
            return
        self.settle()  # weights that moved until now are a step of the window that ends
        watch, module = self._recording.watch, call.module
        watched_ids = {id(parameter) for parameter in watch.all_parameters()}
        new = [parameter for parameter in module.parameters() if id(parameter) not in watched_ids]
        if self.is_expected:
            trained = [parameter for parameter in new if parameter.requires_grad]
            if trained:  # stands for an optimizer of the parameters that this model adds
                watch.add(ByHand(trained))
        # A run that follows another one is told: each micro-batch may move weights on purpose before the first step.
        elif not self._windows.steps and not self._recording.job.sources:
            has_optimizer = len(new) < len(list(module.parameters()))
            self._steps.look(module, has_optimizer=has_optimizer)
            # The run is made again, as one of a script that moves its weights itself.
            if (self._steps.windows if has_optimizer else self._steps.moves) >= CERTAIN:
                self._finish(Ending.BY_HAND, 0)

    def begin_differentiation(self, _: Differentiation) -> None:
        """Records steps; what moves weights after this may be one."""
        self.settle()
        self._steps.note_differentiation()

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

    def hunt(self, call: Differentiation) -> None:
        """Looks for the lines of further changes, until the next call."""
        if not isinstance(call, BackwardCall) or call.is_counted:
            self._recording.unannounced.hunt(self._has_changes)

    def accept_weights(self) -> None:
        """Takes the weights as they are: a control has moved them, and no step of the script's."""
        for entry in self._recording.watch if self.is_expected else ():
            entry.optimizer.take()

    def keep_used(self) -> None:
        """Keeps the gradients that a step by hand is about to use."""
        for entry in self._recording.watch if self.is_expected else ():
            entry.keep_used()

    def _has_changes(self, _: Place) -> bool:
        """Whether a line has changed something; it finds the gradients as the step uses them."""
        if out_of_sight():
            return False
        with self._recording.guard.work():
            has_changes = self._recording.unannounced.has_changes()
            if has_changes:
                self.keep_used()
            return has_changes

    def _record_step(self, entry: Watched, before: torch.Tensor) -> None:
        hand, journal, windows = entry.optimizer, self._recording.journal, self._windows
        windows.had_gradients = True
        change = hand.take_change()
        self._gradients.count_waiting(entry)
        if not entry.increments:
            return  # nothing was differentiated: weights that were loaded, say
        # A second step of the same weights begins an update of its own, as it does with an optimizer.
        if entry.index in self._updates.open.steps:
            self._updates.close()
        windows.count_step(entry)
        stamp = journal.stamp(self._recording.unannounced.moving_line or (None, None))
        journal.add(Step(*stamp, optimizer=entry.index, by_hand=True))
        if entry.summed is None or any(part.cleared for part in entry.increments):  # its sums lie elsewhere
            windows.by_change = True
            windows.store(entry, before, change)
        else:
            windows.store(entry, before)
        self._updates.open.capture_after_step(entry, self._recording.names.buffers(), led=False)
        if entry.is_cleared:  # the script keeps its sums elsewhere: nothing is left that a later step could use again
            journal.add(ClearedByHand(*journal.stamp((None, None)), optimizers=(entry.index,)))
        if self.undoes_steps:
            hand.undo()
            self._recording.watch.look()
        self._updates.end_if_complete()
