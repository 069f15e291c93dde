"""Steps and updates: what an optimizer uses, what the script does without one, and how a recorded run ends.

A gradient from `autograd.grad` may be for anything, a penalty or a norm that is only looked at. So such a pass waits:
it counts as a backward pass once a step uses gradients that no backward pass gave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gaverify.audit.recording.session import Session
from gaverify.audit.recording.storage import Update, addends_of, leave, leave_together, shards_alone
from gaverify.audit.recording.unannounced import ByHand
from gaverify.audit.recording.values import place_in_group
from gaverify.audit.recording.watching import Watched, parameters_of
from gaverify.passes.wrappers import is_sharded
from gaverify.records.events import Backward, ClearedByHand, End, Ending, Step
from gaverify.tracebacks import Place, user_place

GRACE = 2.0
"""Seconds that a script has after its last update for what belongs to it: `zero_grad`, `scheduler.step`, `update`."""


class Steps(Session):
    """The script's updates: the steps of its optimizers, and those that it makes itself."""

    def optimizer_made(self, optimizer: Any) -> None:
        """Notes a new optimizer, with which the loop begins; where the script moves its weights itself none counts."""
        if not self.by_hand:
            with self.work():
                self.watch.add(optimizer)
                if self.perturbation is not None and self.perturbation.at_optimizer:
                    self.perturbation.move(self.watch.all_parameters())
        self._loop.start()

    def step_begins(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Before an optimizer's step; returns a closure to use in place of the script's, if that has one."""
        if self.by_hand or self.guard.off:
            return None
        with self._loop.ignore_draws():
            if self._is_inner(optimizer):
                self._inner.append(optimizer)
                self._parts.add(self.watch.add(optimizer))
                return None
            self._outer, place = optimizer, user_place()
            if closure is None:
                self._before_step(optimizer, place, lead=True)
                return None

        def evaluate_closure() -> Any:
            result = closure()
            if self.guard.searching is None:
                self._before_step(optimizer, place, lead=False)
                self.guard.searching = optimizer  # later evaluations of a line search are not at the window's weights
            return result

        return evaluate_closure

    def step_ended(self, optimizer: Any) -> None:
        """After an optimizer's step."""
        with self._loop.ignore_draws():
            if not self.by_hand:
                self._after_step(optimizer)
        if not self.guard.off:
            self._loop.steps += 1

    def finish(self, reason: Ending, status: int, code: str = "") -> None:
        """Writes everything and ends the process; one that failed waits for no other rank.

        Args:
            reason: Why it ends.
            status: Its exit status.
            code: What the script gave `sys.exit`, as Python writes it.
        """
        with self.guard.lock:
            self.close(reason, code)
            if self.job.meeting is not None and not status:
                leave_together(self.job.meeting, self.rank, self.ranks)
            leave(status)

    def close(self, reason: Ending, code: str = "") -> None:
        """Writes everything, once; nothing is recorded any more."""
        with self.work():
            self._loop.close()
            if self.guard.closed:
                return
            self._settle_by_hand()
            self.guard.closed = True
            self._unannounced_changes.end_hunt()
            self._close_update()
            self._journal.add(End(*self._journal.stamp(), reason=reason))
            self.storage.finish(self._summarise(reason, code))

    # -- what lies behind them ---------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Any) -> None:
        if self._inner and self._inner[-1] is optimizer:
            self._inner.pop()
            return
        if self._outer is optimizer:
            self._outer = None
        if self.guard.searching is optimizer:
            self.guard.searching = None
        if self.guard.off:
            return
        with self.work():
            if self._undone is not None:
                self._undone.undo()
                self._undone = None
            led = self.lead.restore_gradients()
            self._unannounced_changes.accept_settings()
            self.watch.look()
            entry = self.watch.of(self.watch.add(optimizer))
            step = f"{entry.index}-{entry.steps}"
            self._update.capture_after_step(entry, self.names.buffers(), led)
            if self.state is not None:
                self.state.end_window()
            buffers = self.names.buffers(of_losses=True)
            if self.job.is_reference:
                self._buffers.store(self.storage, step, buffers)
            elif led:
                self._buffers.load(step, buffers)
            self._end_if_complete()

    def _before_step(self, optimizer: Any, place: Place | None, lead: bool) -> None:
        with self.work():
            index = self.watch.add(optimizer)
            self._count_waiting(self.watch.of(index))
            if index in self._update.steps:
                if self._complete:
                    self._stop()
                self._close_update()
            look = self.watch.look()
            self._unannounced_changes.note(look, "backward" if self._phase.in_backward else "between")
            self.steps += 1
            entry = self.watch.of(index)
            entry.steps += 1
            by_hand, stamp = index in look.changed, self._journal.stamp(place)
            self._journal.add(Step(*stamp, optimizer=index, inside=self._phase.in_backward, by_hand=by_hand))
            self.rank, self.ranks = max((self.rank, self.ranks), place_in_group(), key=lambda place: place[1])
            self._open_window(entry)
            if lead:
                self.lead.replace_gradients(entry)
            if self.undoes_steps:
                self._undone = ByHand(self.watch.parameters(index))
            self._had_gradients = self._had_gradients or not entry.is_cleared

    def _is_inner(self, optimizer: Any) -> bool:
        """Whether a step is a part of another optimizer's, which holds all its parameters: a wrapper's, or a shard's.

        The wrapper's step is then the script's, with what it does to the gradients before it.
        """
        if self._outer is None or self._outer is optimizer:
            return False
        outer_ids = {id(parameter) for parameter in parameters_of(self._outer)}
        return all(id(parameter) in outer_ids for parameter in parameters_of(optimizer))

    def _open_window(self, entry: Watched, moved: Any = None, change: Any = None) -> None:
        """Stores what a step is made of, and opens the next window of its optimizer.

        What was cleared before the step and used by another optimizer's is that one's: a GAN's generator loss also
        reaches the discriminator. `moved` and `change` are those of `Update.capture`.
        """
        entry.increments = [part for part in entry.increments if not (part.cleared and part.backward in self._used)]
        self._used |= {part.backward for part in entry.increments if not part.cleared}
        forwards = [self._forwards[number] for number in sorted(entry.forwards)]
        is_asked_for = self._update.number <= max(self.job.updates, 1)
        stored = is_asked_for and self.job.role != "events" and not self.undoes_steps
        self._addends[entry.index] = addends_of(entry.sample.parameters)
        tensors = self._update.capture(entry, forwards, moved, change)
        if self.rank and not self.job.is_reference:
            tensors = shards_alone(tensors, entry.sample.parameters)  # of replicas, those of rank 0 are read
        if stored:
            shared = self.ranks if any(map(is_sharded, entry.sample.parameters)) else 1
            updates_left = max(self.job.updates, 1) - self._update.number + 1
            self.storage.reserve(
                (value for members in tensors.values() for value in members.values()), updates_left * shared
            )
        for kind, members in tensors.items() if stored else ():
            self.storage.tensors(f"{kind}-{entry.index}-{entry.steps}", members)
        entry.pending, entry.increments, entry.forwards = 0, [], set()
        entry.summed = entry.used = None

    def _settle_by_hand(self) -> None:
        """Records the steps that the script has made itself since the last look."""
        if not self.by_hand:
            return
        self._unannounced_changes.end_hunt()
        look = self.watch.look()
        for index, before in look.moved.items():
            self._step_by_hand(self.watch.of(index), before)
        self._unannounced_changes.note(replace(look, moved={}), "between")

    def _step_by_hand(self, entry: Watched, before: torch.Tensor) -> None:
        hand, self._had_gradients = entry.optimizer, True
        change = hand.take_change()
        self._count_waiting(entry)
        if not entry.increments:
            return  # nothing was differentiated: weights that were loaded, say
        if entry.index in self._update.steps:
            self._close_update()
        self.steps += 1
        entry.steps += 1
        stamp = self._journal.stamp(self._unannounced_changes.moving_line or (None, None))
        self._journal.add(Step(*stamp, optimizer=entry.index, by_hand=True))
        if entry.summed is None or any(part.cleared for part in entry.increments):  # its sums lie elsewhere
            self._by_change = True
            self._open_window(entry, before, change)
        else:
            self._open_window(entry, before)
        self._update.capture_after_step(entry, self.names.buffers(), led=False)
        if entry.is_cleared:  # the script keeps its sums elsewhere: nothing is left that a later step could use again
            self._journal.add(ClearedByHand(*self._journal.stamp((None, None)), optimizers=(entry.index,)))
        if self.undoes_steps:
            hand.undo()
            self.watch.look()
        self._end_if_complete()

    def _count_waiting(self, entry: Watched) -> None:
        """The passes that wait count as backward passes where no backward pass gave what the step is made of."""
        alone = all(part.cleared for part in entry.increments)
        counted = [part for part in self._waiting if entry.index in part.changes and alone]
        self._waiting = [part for part in self._waiting if entry.index not in part.changes]
        for part in counted:
            self._numbers["backward"] += 1
            number = self._numbers["backward"]
            for index, change in part.changes.items():
                reached_entry = self.watch.of(index)
                reached_entry.pending += 1
                reached_entry.receive(number, change, part.reached)
            touched, targets, reached = tuple(sorted(part.changes)), part.targets, tuple(part.reached)
            stamp = self._journal.stamp(part.place)
            self._journal.add(Backward(*stamp, optimizers=touched, targets=targets, forwards=reached))
        if counted:
            self._targets.clear()

    def _begin(self) -> None:
        """A new forward or backward: what was done after the last step is over."""
        self._unannounced_changes.end_hunt()
        self._unannounced_changes.note_settings()
        if self._complete:
            self._stop()
        self._close_update()

    def _close_update(self) -> None:
        """Ends the update whose step has been made, once something new begins."""
        if not self._update.steps:
            return
        number = self._update.number
        if self.job.role != "events":
            self._update.write(self.storage, {at: self.watch.of(at).steps for at in self._update.steps})
        if self.outputs is not None and self._is_last_update:
            self.storage.tensors("outputs", self.outputs.forwards)
        if self.pinned_modules is not None and self._is_last_update:
            own_positions = {at: self.pinned_modules.own(self.watch.parameters(at)) for at in range(len(self.watch))}
            self.storage.tensors("pinned", self.pinned_modules.forwards if self.source is None else own_positions)
        self.draws.close(number)
        self._update, self._journal.update = Update(number + 1), number + 1

    def _end_if_complete(self) -> None:
        """Sees to it that the script ends soon if it has made all updates that were asked for."""
        if self.job.updates and self._update.number >= self.job.updates and not self._complete:
            self._complete = True
            timer = threading.Timer(GRACE, self._stop)
            timer.daemon = True
            timer.start()

    def _stop(self) -> None:
        self.finish(Ending.UPDATES, 0)
