"""Changes that a script makes itself: of weights, gradients and settings between calls, and steps by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gaverify.audit.recording.calls import BackwardCall, Differentiation, ForwardCall
from gaverify.audit.recording.context import Recording
from gaverify.audit.recording.listeners.gradients import GradientListener
from gaverify.audit.recording.listeners.updates import UpdateListener, WindowListener
from gaverify.audit.recording.unannounced import CERTAIN, ByHand, UnannouncedSteps
from gaverify.audit.recording.values import out_of_sight
from gaverify.audit.recording.watching import Watched
from gaverify.records.events import ClearedByHand, Ending, Step
from gaverify.tracebacks import Place


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
        elif not self._windows.steps:
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
