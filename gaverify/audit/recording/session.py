"""The state of a recorded run: its update, its events, and how it ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gaverify.audit.events import Event, Kind
from gaverify.audit.job import Job
from gaverify.audit.recording.changes import Changes
from gaverify.audit.recording.control import Held, Perturbation, use_math_kernels
from gaverify.audit.recording.draws import Draws
from gaverify.audit.recording.names import Names
from gaverify.audit.recording.places import user_place
from gaverify.audit.recording.precision import Roundoff
from gaverify.audit.recording.storage import Storage, leave
from gaverify.audit.recording.update import Update
from gaverify.audit.recording.watching import Watch


class Session:
    """What a `Recorder` works on.

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
        self._searching: Any = None  # the optimizer whose step evaluates its closure again
        self._changes = Changes(self.watch, self._event)
        self._in_forward = self._in_backward = self._complete = False
        self._targets: list[tuple[torch.Tensor, int]] = []
        self._perturbation = Perturbation(job.unit) if job.role == "perturbed" else None
        self._held = Held() if job.role == "frozen" else None
        self._draws = Draws(job, storage.folder)
        if job.math_kernels:
            use_math_kernels()

    @property
    def off(self) -> bool:
        """Whether a call is none of the recorder's business: its own, a line search's, or one in a worker process."""
        return self._busy or self._searching is not None or os.getpid() != self.storage.process

    def finish(self, reason: str, status: int) -> None:
        """Writes everything and ends the process."""
        with self._work():
            self._changes.settle()
            self._close_update()
            self._event("end", reason=reason)
            self._busy = True
            self.storage.finish(self._meta(reason))
        leave(status)

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
        self._changes.settle()
        if self._complete:
            self._stop()
        self._close_update()

    def _close_update(self) -> None:
        """Ends the update whose step has been made, once something new begins."""
        if not self._update.steps:
            return
        number = self._update.number
        if self.job.role != "events":
            self._update.write(self.storage)
        self._draws.close(number)
        self._update = Update(number + 1)

    def _event(self, kind: Kind, place: tuple[Any, Any] | None = None, **values: Any) -> None:
        file, line = place or user_place() or (None, None)
        self.storage.event(Event(kind, self._update.number, file, line, values))

    def _stop(self) -> None:
        self.finish("updates", 0)

    def _meta(self, reason: str) -> dict[str, Any]:
        return {
            **self._draws.summary(),
            "reason": reason,
            "updates": self._update.number - 1,
            "unit": self.roundoff.unit,
            "working": self.roundoff.describe(),
            "modules": [type(model).__name__ for model in self.names.models],
            "parameters": {
                self.names.key(parameter, index, ordinal): list(parameter.shape)
                for index in range(len(self.watch))
                for ordinal, parameter in enumerate(self.watch.parameters(index))
            },
            "optimizers": [type(self.watch.of(index).optimizer).__name__ for index in range(len(self.watch))],
            "torch": torch.__version__,
        }
