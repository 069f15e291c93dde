"""Records what a training script does, call by call, and what its optimizers are given.

The script's own code runs between the two halves of each method here; nothing of it is changed: generators, gradients,
weights (but in the runs that move or hold them on purpose) and exceptions pass through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gaverify.audit.recording.averages import Average
from gaverify.audit.recording.pass_recorder import PassRecorder
from gaverify.audit.recording.places import user_place
from gaverify.audit.recording.ranks import addends_of, place_in_group, shards_alone
from gaverify.audit.recording.update import Forward
from gaverify.audit.recording.watching import Watched, parameters_of
from gaverify.passes.shards import is_sharded
from gaverify.records.events import Kind
from gaverify.tracebacks import Place

GRACE = 2.0
"""Seconds that a script has after its last update for what belongs to it: `zero_grad`, `scheduler.step`, `update`."""


class Recorder(PassRecorder):
    """All calls of the script, each with what is noted before and after it."""

    def optimizer_made(self, optimizer: Any) -> None:
        """Notes a new optimizer."""
        with self._work():
            self.watch.add(optimizer)
            if self._perturbation is not None and self.job.perturb_early:
                self._perturbation.move(self.watch.all_parameters())

    @contextmanager
    def zero_grad(self) -> Iterator[None]:
        """Surrounds a call of `zero_grad`, of an optimizer or a module."""
        with self._work():
            self._changes.note(self.watch.look(), "backward" if self._in_backward else "between")
        yield
        with self._work():
            cleared = self.watch.look().cleared
            self.watch.forget(cleared)
            self._event("zero_grad", cleared=cleared)

    @contextmanager
    def clip(self, call: str, limit: float | None) -> Iterator[Callable[[Any], None]]:
        """Surrounds gradient clipping; gives a function that is to be called with its result, the norm.

        Args:
            call: What was called.
            limit: The largest norm, or value, that it lets through; None where it is not known.
        """
        result: list[Any] = [None]
        with self._work():
            seen = self.watch.look()
            self._changes.note(seen, "between")
            for entry in self.watch.entries():
                if entry.summed is not None and not entry.clipped and entry.index in seen.changed:
                    entry.keep()
        yield lambda output: result.__setitem__(0, output)
        with self._work():
            changed = self.watch.look().changed
            for index in changed:
                self.watch.of(index).clipped = True
            norm = float(result[0]) if isinstance(result[0], torch.Tensor) else result[0]
            self._event("clip", call=call, active=bool(changed), optimizers=sorted(changed), norm=norm, limit=limit)

    def unscaled(self) -> None:
        """After a `GradScaler` took its scale out of the gradients: they are kept as they are without it."""
        with self._work():
            for index in self.watch.look().changed:
                entry = self.watch.of(index)
                if entry.summed is not None and not entry.clipped:
                    entry.keep()

    @contextmanager
    def scaler(self, call: str) -> Iterator[None]:
        """Surrounds a call of a `GradScaler`."""
        with self._work():
            self._changes.note(self.watch.look(), "between")
            before, place = self.steps, user_place()
        yield
        with self._work():
            self.watch.look()
            skipped = call == "step" and self.steps == before
            self._event("scaler", place, call=call, skipped=skipped)
            if skipped:
                self.watch.forget(range(len(self.watch)))

    @contextmanager
    def average(self, average: nn.Module, model: nn.Module) -> Iterator[None]:
        """Surrounds an update of an averaged copy of a model."""
        with self._work():
            update = Average(average, model)
        yield
        with self._work():
            self._event("average", **update.decay())
            self._averages.forget()

    def simple(self, kind: Kind, **values: Any) -> None:
        """Notes a call that needs nothing measured."""
        with self._work():
            self._event(kind, **values)
            if kind == "scheduler":
                self._changes.know_settings()

    def step_begins(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Before an optimizer's step; returns a closure to use in place of the script's, if that has one."""
        if self.off:
            return None
        if self._is_inner(optimizer):
            self._inner.append(optimizer)
            self._parts.add(self.watch.add(optimizer))
            return None
        self._outer = optimizer
        if closure is None:
            self._before_step(optimizer, user_place(), lead=True)
            return None
        place = user_place()

        def recorded() -> Any:
            result = closure()
            if self._searching is None:
                self._before_step(optimizer, place, lead=False)
                self._searching = optimizer  # later evaluations of a line search are not at the window's weights
            return result

        return recorded

    def step_ended(self, optimizer: Any) -> None:
        """After an optimizer's step."""
        if self._inner and self._inner[-1] is optimizer:
            self._inner.pop()
            return
        if self._outer is optimizer:
            self._outer = None
        if self._searching is optimizer:
            self._searching = None
        if self.off:
            return
        with self._work():
            if self._held is not None:
                self._held.put_back()
            led = self._lead.put_back()
            self._changes.know_settings()
            self.watch.look()
            entry = self.watch.of(self.watch.add(optimizer))
            buffers, step = self.names.buffers(), f"{entry.index}-{entry.steps}"
            self._update.stepped(entry, buffers, led)
            if self.job.role == "full":
                self._buffers.keep(self.storage, step, buffers)
            elif led:
                self._buffers.put(step, buffers)
            self._end_if_complete()

    def _is_inner(self, optimizer: Any) -> bool:
        """Whether a step is a part of another optimizer's, which holds all its parameters: a wrapper's, or a shard's.

        The wrapper's step is then the script's, with what it does to the gradients before it.
        """
        if self._outer is None or self._outer is optimizer:
            return False
        held = {id(parameter) for parameter in parameters_of(self._outer)}
        return all(id(parameter) in held for parameter in parameters_of(optimizer))

    def _end_if_complete(self) -> None:
        """Sees to it that the script ends soon if it has made all updates that were asked for."""
        if self.job.updates and self._update.number >= self.job.updates and not self._complete:
            self._complete = True
            timer = threading.Timer(GRACE, self._stop)
            timer.daemon = True
            timer.start()

    # -- what lies behind them ---------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, place: Place | None, lead: bool) -> None:
        with self._work():
            index = self.watch.add(optimizer)
            if self._update.steps and not self._update.joins(index):
                if self._complete:
                    self._stop()
                self._close_update()
            seen = self.watch.look()
            self._changes.note(seen, "backward" if self._in_backward else "between")
            self._changes.note_averages()
            self._averages.search()
            self.steps += 1
            entry = self.watch.of(index)
            entry.steps += 1
            self._event("step", place, optimizer=index, inside=self._in_backward, by_hand=index in seen.changed)
            self.rank, self.ranks = max((self.rank, self.ranks), place_in_group(), key=lambda place: place[1])
            self._open_window(entry, lambda forwards: self._update.capture(entry, forwards))
            if lead:
                self._lead.lend(entry)
            if self._held is not None:
                self._held.take(self.watch.parameters(index))

    def _open_window(self, entry: Watched, capture: Callable[[list[Forward]], Mapping[str, Mapping[int, Any]]]) -> None:
        """Stores what a step is made of, and opens the next window of its optimizer.

        What was cleared before the step and used by another optimizer's is that one's: a GAN's generator loss also
        reaches the discriminator.
        """
        entry.increments = [part for part in entry.increments if not (part.cleared and part.backward in self._used)]
        self._used |= {part.backward for part in entry.increments if not part.cleared}
        forwards = [forward for forward in self._forwards if forward.number in entry.forwards]
        stored = self.job.role not in ("events", "frozen") and self._update.number <= max(self.job.updates, 1)
        self._addends[entry.index] = addends_of(entry.sample.parameters)
        tensors = capture(forwards)
        if self.rank and self.job.role != "full":
            tensors = shards_alone(tensors, entry.sample.parameters)  # of replicas, those of rank 0 are read
        if stored:
            shared = self.ranks if any(map(is_sharded, entry.sample.parameters)) else 1
            left = max(self.job.updates, 1) - self._update.number + 1
            self.storage.reserve((value for members in tensors.values() for value in members.values()), left * shared)
        for kind, members in tensors.items() if stored else ():
            self.storage.tensors(f"{kind}-{entry.index}-{entry.steps}", members)
        entry.pending, entry.increments, entry.forwards = 0, [], set()
        entry.summed = entry.used = None
