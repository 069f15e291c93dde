"""Records what a training script does, call by call, and what its optimizers are given.

The script's own code runs between the two halves of each method here; nothing of it is changed: generators, gradients,
weights (but in the runs that move or hold them on purpose) and exceptions pass through.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gaverify.audit.events import Event, Kind
from gaverify.audit.job import Job
from gaverify.audit.recording.control import Held, Perturbation, use_math_kernels
from gaverify.audit.recording.draws import DealtDraws, DrawMode, KeptDraws
from gaverify.audit.recording.names import Names
from gaverify.audit.recording.places import LineHunt, Place, user_place
from gaverify.audit.recording.precision import Roundoff
from gaverify.audit.recording.rows import input_rows, input_shapes
from gaverify.audit.recording.storage import Storage, leave
from gaverify.audit.recording.update import Update
from gaverify.audit.recording.watching import Seen, Watch

GRACE = 2.0
"""Seconds that a script has after its last update for what belongs to it: `zero_grad`, `scheduler.step`, `update`."""


class Recorder:
    """The state of one recorded run.

    Args:
        job: What is run, and the part that it plays.
        storage: Where the record goes.
    """

    def __init__(self, job: Job, storage: Storage) -> None:
        self.job, self.storage = job, storage
        self.watch, self.names, self.roundoff = Watch(), Names(), Roundoff()
        self.steps = 0  # optimizer steps so far, of any optimizer
        self._update = Update(1)
        self._lock = threading.RLock()
        self._busy = False  # the recorder's own calls, and calls inside a recorded one, are not recorded
        self._hunt, self._hunting, self._places = LineHunt(), False, dict[str, Place | None]()
        self._in_forward = self._in_backward = self._complete = False
        self._targets: list[tuple[torch.Tensor, int]] = []
        self._handler: Any = None
        self._perturbation = Perturbation(job.unit) if job.role == "perturbed" else None
        self._held = Held() if job.role == "frozen" else None
        folder = storage.folder
        self._kept = KeptDraws(folder) if job.role == "full" else None
        dealt = job.source is not None and job.role in ("accumulated", "frozen")
        self._dealt = DealtDraws(_path(job.source)) if dealt else None
        if self._dealt is not None:
            self._dealt.open(1)
        if job.math_kernels:
            use_math_kernels()

    # -- the calls of the script -------------------------------------------------------------------------------------

    @property
    def off(self) -> bool:
        """Whether a call is none of the recorder's business: its own, or one in a worker process."""
        return self._busy or os.getpid() != self.storage.process

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
            with self._draws(module if trains else None):
                yield
        finally:
            self._in_forward = False
            if trains:
                with self._work():
                    self._note(self.watch.look(), "forward")

    def inside_forward(self) -> bool:
        """Whether a forward is running; its inner modules tell the precision that they work in."""
        if self._in_forward and self.roundoff.open:
            self.roundoff.look_at_autocast()
        return self._in_forward

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surrounds a backward pass."""
        with self._work():
            self._begin()
            self._note(self.watch.look(), "between")
            place, self._in_backward = user_place(), True
        try:
            with DrawMode(self._handler) if self._handler is not None else nullcontext():
                yield
        finally:
            self._in_backward = False
        with self._work():
            self._after_backward(place)

    @contextmanager
    def zero_grad(self) -> Iterator[None]:
        """Surrounds a call of `zero_grad`, of an optimizer or a module."""
        with self._work():
            self._note(self.watch.look(), "backward" if self._in_backward else "between")
        yield
        with self._work():
            cleared = self.watch.look().cleared
            self._clear(cleared)
            self._event("zero_grad", cleared=cleared)

    @contextmanager
    def clip(self, call: str) -> Iterator[None]:
        """Surrounds gradient clipping."""
        with self._work():
            self._note(self.watch.look(), "between")
        yield
        with self._work():
            self._event("clip", call=call, active=bool(self.watch.look().changed))

    @contextmanager
    def scaler(self, call: str) -> Iterator[None]:
        """Surrounds a call of a `GradScaler`."""
        with self._work():
            self._note(self.watch.look(), "between")
            before, place = self.steps, user_place()
        yield
        with self._work():
            self.watch.look()
            skipped = call == "step" and self.steps == before
            self._event("scaler", place, call=call, skipped=skipped)
            if skipped:
                self._clear([entry for entry in range(len(self.watch))])

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
        place, first = user_place(), True

        def recorded() -> Any:
            nonlocal first
            result = closure()
            if first:  # later evaluations of a line search are not at the window's weights
                first = False
                self._before_step(optimizer, place)
            return result

        return recorded

    def step_ended(self, optimizer: Any) -> None:
        """After an optimizer's step."""
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

    def finish(self, reason: str, status: int) -> None:
        """Writes everything and ends the process."""
        with self._work():
            self._hunt.stop()
            self._close_update()
            self._event("end", reason=reason)
            self._busy = True
            self.storage.finish(self._meta(reason))
        leave(status)

    # -- what lies behind them ---------------------------------------------------------------------------------------

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Runs the recorder's own code: one thread at a time, unrecorded, its failures never the script's."""
        with self._lock:
            before, self._busy = self._busy, True
            try:
                with torch.no_grad():
                    yield
            except Exception as error:
                self.storage.give_up(error)
            finally:
                self._busy = before

    def _begin(self) -> None:
        """A new forward or backward: what was done after the last step is over."""
        self._hunt_ends()
        if self._complete:
            self._stop()
        self._close_update()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._begin()
        self._note(self.watch.look(), "between")
        self.roundoff.add(module)
        if self._perturbation is not None:
            self._perturbation.move([*module.parameters(), *self.watch.all_parameters()])
            self.watch.look()
        shapes = input_shapes(args, kwargs)
        rows = next((shape[0] for shape in shapes), None)
        self._event("forward", rows=rows, model=self.names.index(module))
        if self.job.role != "events":
            self._update.rows.append(input_rows(args, kwargs))
        self._handler = None
        if self._kept is not None:
            self._handler = self._kept.handler(shapes)
        elif self._dealt is not None:
            self._handler = self._dealt.handler(shapes)

    def _draws(self, module: nn.Module | None) -> Any:
        """The mode that sees random draws; compiled graphs do not run under one, their draws stay their own."""
        compiled = module is not None and (hasattr(module, "_orig_mod") or module._compiled_call_impl is not None)
        if module is None or self._handler is None or compiled:
            return nullcontext()
        return DrawMode(self._handler)

    def _after_backward(self, place: Place | None) -> None:
        seen = self.watch.look()
        touched = [index for index, change in seen.changed.items() if bool(change.any())]
        for index in touched:
            self.watch.of(index).pending += 1
        self._update.increments.append({index: seen.changed[index] for index in touched})
        targets = [(int(valid), total) for valid, total in self._targets]
        self._targets.clear()
        self._event("backward", place, touched=touched, targets=targets)
        self._note(Seen(moved=seen.moved), "backward")
        if self._hunting and not self._places:
            self._hunt.start(self._quiet_difference)

    def _quiet_difference(self) -> bool:
        with self._work():
            return self.watch.differs()

    def _hunt_ends(self) -> None:
        if self._hunt.active:
            self._hunt.stop()
            if self._hunt.found is not None:
                self._places["found"] = self._hunt.found

    def _note(self, seen: Seen, where: str) -> None:
        """Records changes that no call announced: cleared gradients, moved weights."""
        self._hunt_ends()
        moved = [index for index in seen.moved if self.watch.of(index).pending]
        cleared = [index for index in seen.cleared if self.watch.of(index).pending]
        place = self._places.get("found")
        if moved:
            self._event("moved", place or (None, None), where=where, optimizers=moved)
        if cleared:
            self._clear(cleared)
            self._event("cleared", place or (None, None), cleared=cleared)
        if (moved or cleared) and where == "between":
            self._hunting = True  # the next time round the line is found

    def _clear(self, indices: list[int]) -> None:
        for index in indices:
            self.watch.of(index).pending = 0

    def _before_step(self, optimizer: Any, place: Place | None) -> None:
        with self._work():
            index = self.watch.add(optimizer)
            if self._update.steps and not self._update.joins(index):
                if self._complete:
                    self._stop()
                self._close_update()
            self._note(self.watch.look(), "backward" if self._in_backward else "between")
            self.steps += 1
            self._event("step", place, optimizer=index, inside=self._in_backward)
            entry = self.watch.of(index)
            entry.pending = 0
            stored = self.job.role != "events" and self._update.number <= max(self.job.updates, 1)
            self._update.capture(entry, self.names, self.storage if stored else None)
            if self._held is not None:
                self._held.take(self.watch.parameters(index))

    def _close_update(self) -> None:
        """Ends the update whose step has been made, once something new begins."""
        if not self._update.steps:
            return
        number = self._update.number
        if self.job.role != "events":
            self._update.write(self.storage)
        if self._kept is not None:
            self._kept.close(number)
        if self._dealt is not None:
            self._dealt.open(number + 1)
        self._update = Update(number + 1)

    def _event(self, kind: Kind, place: tuple[Any, Any] | None = None, **values: Any) -> None:
        file, line = place or user_place() or (None, None)
        self.storage.event(Event(kind, self._update.number, file, line, values))

    def _stop(self) -> None:
        self.finish("updates", 0)

    def _meta(self, reason: str) -> dict[str, Any]:
        if self._dealt is not None:
            self._dealt.close()
        return {
            "reason": reason,
            "updates": self._update.number - 1,
            "unit": self.roundoff.unit,
            "working": self.roundoff.describe(),
            "fused": sorted(self._kept.fused) if self._kept else [],
            "draws": self._kept.count if self._kept else 0,
            "dealt": self._dealt.sliced if self._dealt else 0,
            "unaligned": self._dealt.unaligned if self._dealt else {},
            "modules": [type(model).__name__ for model in self.names.models],
            "parameters": {
                self.names.key(parameter, index, ordinal): list(parameter.shape)
                for index in range(len(self.watch))
                for ordinal, parameter in enumerate(self.watch.parameters(index))
            },
            "optimizers": [type(self.watch.of(index).optimizer).__name__ for index in range(len(self.watch))],
            "torch": torch.__version__,
        }


def _path(text: str | None) -> Any:
    from pathlib import Path

    return Path(text or ".")
