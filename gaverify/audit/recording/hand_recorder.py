"""The recorder of what torch announces with no call: gradients from `autograd.grad`, and weights that a script moves.

A gradient from `autograd.grad` may be for anything, a penalty or a norm that is only looked at. So such a pass waits:
it counts as a backward pass once a step uses gradients that no backward pass gave.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gaverify.audit.job import Job
from gaverify.audit.recording.by_hand import ByHand, Unannounced
from gaverify.audit.recording.places import user_place
from gaverify.audit.recording.recorder import Recorder
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.values import plain
from gaverify.audit.recording.watching import Increment, Watched
from gaverify.records.events import Ending
from gaverify.tracebacks import Place

_BY_THE_SCRIPT = "weights moved by the script itself"


@dataclass(frozen=True)
class Waiting:
    """A call of `autograd.grad` for parameters: what it gave each optimizer, at the sampled elements."""

    place: Place | None
    reached: list[int]
    targets: list[tuple[int, int]]
    changes: dict[int, torch.Tensor]


class HandRecorder(Recorder):
    """Adds to the recorder what scripts do without an optimizer or a backward pass of torch's."""

    def __init__(self, job: Job, storage: Storage) -> None:
        super().__init__(job, storage)
        self._unannounced = Unannounced()
        self._waiting: list[Waiting] = []
        self._had_gradients = False  # whether any step had something to use
        self._by_change = False  # whether the change of the weights stood for the gradient of any

    def optimizer_made(self, optimizer: Any) -> None:
        """Notes a new optimizer; where the script moves its weights itself there is none that counts."""
        if not self.job.by_hand:
            super().optimizer_made(optimizer)

    def step_begins(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Before an optimizer's step."""
        return None if self.job.by_hand else super().step_begins(optimizer, closure)

    def step_ended(self, optimizer: Any) -> None:
        """After an optimizer's step."""
        if not self.job.by_hand:
            super().step_ended(optimizer)

    @contextmanager
    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Surrounds a backward pass."""
        with self._work():
            self._settle_by_hand()
            self._unannounced.differentiated()
        with super().backward(tensors, *args, **kwargs):
            yield

    @contextmanager
    def zero_grad(self) -> Iterator[None]:
        """Surrounds a call of `zero_grad`."""
        with self._work():
            self._settle_by_hand()
        with super().zero_grad():
            yield

    @contextmanager
    def clip(self, call: str, limit: float | None) -> Iterator[Callable[[Any], None]]:
        """Surrounds gradient clipping."""
        with super().clip(call, limit) as ended:
            yield ended
        self._keep_used()

    @contextmanager
    def differentiation(self, outputs: Any, inputs: Sequence[Any]) -> Iterator[Callable[[Sequence[Any]], None]]:
        """Surrounds a call of `autograd.grad` for parameters; gives a function to be called with its result."""
        results: list[Any] = []
        with self._work():
            self._settle_by_hand()
            self._unannounced.differentiated()
            self._reach.begin()
            place, self._in_backward = user_place(), True
        try:
            with self._draws.in_backward(), self._shrunk(outputs):
                yield results.extend
        finally:
            self._in_backward = False
        with self._work():
            targets = [(int(valid), total) for valid, total in self._targets]
            changes = self._sampled(inputs, results)
            if changes:
                self._waiting.append(Waiting(place, self._reach.peek(), targets, changes))
            self._changes.hunt(self._quiet_difference)

    def close(self, reason: Ending, code: str = "") -> None:
        """Writes everything, once; nothing is recorded any more."""
        with self._work():
            if not self._closed:
                self._settle_by_hand()
        super().close(reason, code)

    # -- what lies behind them ---------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._settle_by_hand()
        if self.job.by_hand:
            self._adopt(module)
        elif not self.steps:
            self._unannounced.look(module)
            if self._unannounced.certain(lambda: self._holds(module)):
                self.finish(Ending.BY_HAND, 0)
        super()._before_forward(module, args, kwargs)
        if self.job.by_hand and self._perturbation is not None:
            for entry in self.watch.entries():
                entry.optimizer.take()  # moved by their roundoff: no step of the script's

    def _quiet_difference(self, place: Place) -> bool:
        """Where the script moves its weights itself, the gradients are used as the line that moves them finds them."""
        found = super()._quiet_difference(place)
        if found:
            self._keep_used()
        return found

    def _keep_used(self) -> None:
        with self._work():
            for entry in self.watch.entries() if self.job.by_hand else ():
                entry.keep_used()

    def _holds(self, module: nn.Module) -> bool:
        """Whether an optimizer of torch's holds parameters of a module."""
        held = {id(parameter) for parameter in self.watch.all_parameters()}
        return any(id(parameter) in held for parameter in module.parameters())

    def _adopt(self, module: nn.Module) -> None:
        known = {id(parameter) for parameter in self.watch.all_parameters()}
        new = [parameter for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in known]
        if new:
            self.watch.add(ByHand(new))

    def _before_step(self, optimizer: Any, place: Place | None, lead: bool) -> None:
        with self._work():
            entry = self.watch.of(self.watch.add(optimizer))
            self._count_waiting(entry)
        super()._before_step(optimizer, place, lead)
        self._had_gradients = self._had_gradients or not entry.cleared

    def _settle_by_hand(self) -> None:
        """Records the steps that the script has made itself since the last look."""
        if not self.job.by_hand:
            return
        self._changes.settle()
        seen = self.watch.look()
        for index, before in seen.moved.items():
            self._step_by_hand(self.watch.of(index), before)
        self._changes.note(replace(seen, moved={}), "between")

    def _step_by_hand(self, entry: Watched, before: torch.Tensor) -> None:
        hand, self._had_gradients = entry.optimizer, True
        change = hand.change()
        self._count_waiting(entry)
        if not entry.increments:
            return  # nothing was differentiated: weights that were loaded, say
        if self._update.steps and not self._update.joins(entry.index):
            self._close_update()
        self.steps += 1
        entry.steps += 1
        self._event("step", self._changes.found or (None, None), optimizer=entry.index, inside=False, by_hand=True)
        if entry.summed is None or any(part.cleared for part in entry.increments):  # its sums lie elsewhere
            self._by_change = True
            self._open_window(entry, lambda forwards: self._update.take(entry, forwards, before, change))
        else:
            self._open_window(entry, lambda forwards: self._update.capture(entry, forwards, before))
        self._update.stepped(entry, self.names.buffers(), led=False)
        if entry.cleared:  # the script keeps its sums elsewhere: nothing is left that a later step could use again
            self._event("cleared", (None, None), cleared=[entry.index])
        if self._held is not None:
            hand.back()
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
                other = self.watch.of(index)
                other.pending += 1
                other.increments.append(Increment(number, change))
                other.forwards |= set(part.reached)
            touched = sorted(part.changes)
            self._event("backward", part.place, touched=touched, targets=part.targets, forwards=part.reached)
        if counted:
            self._targets.clear()

    def _sampled(self, inputs: Sequence[Any], results: Sequence[Any]) -> dict[int, torch.Tensor]:
        given = {id(tensor): result for tensor, result in zip(inputs, results, strict=False) if result is not None}
        found = {}
        for index in range(len(self.watch)):
            sample = self.watch.of(index).sample
            if not any(id(parameter) in given for parameter in sample.parameters):
                continue
            parts = []
            for at, (parameter, size) in enumerate(zip(sample.parameters, sample.sizes, strict=True)):
                result = given.get(id(parameter))
                values = plain(result) if isinstance(result, torch.Tensor) else None
                nothing = torch.zeros(size, dtype=torch.float64, device="cpu")
                parts.append(nothing if values is None else sample.elements(at, values))
            found[index] = torch.cat(parts)
        return found

    def _meta(self, reason: Ending) -> dict[str, Any]:
        moves = not self.steps and self._unannounced.moves > 0
        meta = {**super()._meta(reason), "by_hand": moves, "had_gradients": self._had_gradients}
        meta |= {"compiled": _compiled(), "by_change": self._by_change}
        return {**meta, "optimizers": [_BY_THE_SCRIPT]} if self.job.by_hand else meta


def _compiled() -> bool:
    """Whether the script has compiled anything: steps inside a compiled graph are not seen."""
    module = sys.modules.get("torch._dynamo.utils")
    return module is not None and bool(module.counters["frames"].get("ok", 0))
