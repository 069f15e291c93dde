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

from gaverify.audit.events import Kind
from gaverify.audit.recording.places import Place, user_place
from gaverify.audit.recording.rows import input_rows, input_shapes
from gaverify.audit.recording.session import Session
from gaverify.audit.recording.watching import Seen

GRACE = 2.0
"""Seconds that a script has after its last update for what belongs to it: `zero_grad`, `scheduler.step`, `update`."""


class Recorder(Session):
    """The calls of the script, each with what is noted before and after it."""

    def optimizer_made(self, optimizer: Any) -> None:
        """Notes a new optimizer."""
        with self._work():
            self.watch.add(optimizer)
            if self._perturbation is not None and self.job.perturb_early:
                self._perturbation.move(self.watch.all_parameters())

    @contextmanager
    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Surrounds the forward of an outermost module."""
        trains = torch.is_grad_enabled()
        with self._work():
            trains = trains and self.names.add(module)
            if trains:
                self._before_forward(module, args, kwargs)
        self._in_forward = True
        try:
            with self._draws.in_forward(module if trains else None):
                yield
        finally:
            self._in_forward = False
            if trains:
                with self._work():
                    self._changes.note(self.watch.look(), "forward")
                    self._draws.leave_forward()

    def inside_forward(self) -> bool:
        """Whether a forward is running, or recomputed; its inner modules tell the precision that they work in."""
        if self._in_forward and self.roundoff.open:
            self.roundoff.look_at_autocast()
        return self._in_forward or self._in_backward

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surrounds a backward pass."""
        with self._work():
            self._begin()
            self._changes.note(self.watch.look(), "between")
            self._draws.enter_backward()
            place, self._in_backward = user_place(), True
        try:
            with self._draws.in_backward():
                yield
        finally:
            self._in_backward = False
        with self._work():
            self._after_backward(place)

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
    def clip(self, call: str) -> Iterator[None]:
        """Surrounds gradient clipping."""
        with self._work():
            self._changes.note(self.watch.look(), "between")
        yield
        with self._work():
            self._event("clip", call=call, active=bool(self.watch.look().changed))

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

    def simple(self, kind: Kind, **values: Any) -> None:
        """Notes a call that needs nothing measured."""
        with self._work():
            self._event(kind, **values)

    def targets(self, valid: torch.Tensor, total: int) -> None:
        """Notes how many targets of a loss count; read at the next backward."""
        if not self.off and torch.is_grad_enabled():
            self._targets.append((valid, total))

    def step_begins(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Before an optimizer's step; returns a closure to use in place of the script's, if that has one."""
        if self.off:
            return None
        if closure is None:
            self._before_step(optimizer, user_place())
            return None
        place = user_place()

        def recorded() -> Any:
            result = closure()
            if self._searching is None:
                self._before_step(optimizer, place)
                self._searching = optimizer  # later evaluations of a line search are not at the window's weights
            return result

        return recorded

    def step_ended(self, optimizer: Any) -> None:
        """After an optimizer's step."""
        if self._searching is optimizer:
            self._searching = None
        if self.off:
            return
        with self._work():
            if self._held is not None:
                self._held.put_back()
            self.watch.look()
            self._update.stepped(self.watch, self.watch.add(optimizer), self.names.buffers())
            if self.job.updates and self._update.number >= self.job.updates and not self._complete:
                self._complete = True
                timer = threading.Timer(GRACE, self._stop)
                timer.daemon = True
                timer.start()

    # -- what lies behind them ---------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._begin()
        self._changes.note(self.watch.look(), "between")
        self.roundoff.add(module)
        if self._perturbation is not None:
            self._perturbation.move([*module.parameters(), *self.watch.all_parameters()])
            self.watch.look()
        shapes = input_shapes(args, kwargs)
        rows = next((shape[0] for shape in shapes), None)
        model = self.names.index(module)
        self._event("forward", rows=rows, model=model)
        prints = input_rows(args, kwargs) if self.job.role != "events" else {}
        self._update.rows.append(prints)
        self._draws.begin((model, module.training, len(shapes)), shapes, prints)

    def _after_backward(self, place: Place | None) -> None:
        seen = self.watch.look()
        touched = [index for index, change in seen.changed.items() if bool(change.any())]
        for index in touched:
            self.watch.of(index).pending += 1
        self._update.increments.append({index: seen.changed[index] for index in touched})
        targets = [(int(valid), total) for valid, total in self._targets]
        self._targets.clear()
        self._event("backward", place, touched=touched, targets=targets)
        self._changes.note(Seen(moved=seen.moved), "backward")
        self._changes.hunt(self._quiet_difference)

    def _quiet_difference(self) -> bool:
        with self._work():
            return self.watch.differs()

    def _before_step(self, optimizer: Any, place: Place | None) -> None:
        with self._work():
            index = self.watch.add(optimizer)
            if self._update.steps and not self._update.joins(index):
                if self._complete:
                    self._stop()
                self._close_update()
            seen = self.watch.look()
            self._changes.note(seen, "backward" if self._in_backward else "between")
            self.steps += 1
            self._event("step", place, optimizer=index, inside=self._in_backward, by_hand=index in seen.changed)
            entry = self.watch.of(index)
            entry.pending = 0
            stored = self.job.role not in ("events", "frozen") and self._update.number <= max(self.job.updates, 1)
            self._update.capture(entry, self.names, self.storage if stored else None)
            if self._held is not None:
                self._held.take(self.watch.parameters(index))
