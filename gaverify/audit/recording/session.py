"""The state of a recorded run: its update, its events, and how it ends."""

from __future__ import annotations

import copy
import multiprocessing.process
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gaverify.audit.job import Job
from gaverify.audit.recording.changes import Changes
from gaverify.audit.recording.control import Held, Perturbation, use_math_kernels
from gaverify.audit.recording.dividing import Weight
from gaverify.audit.recording.draws import draws_of
from gaverify.audit.recording.followers import Followers
from gaverify.audit.recording.graph import Reach, keep_lines
from gaverify.audit.recording.holding import Holding
from gaverify.audit.recording.leading import Buffers, Lead
from gaverify.audit.recording.names import Names
from gaverify.audit.recording.outputs import Outputs
from gaverify.audit.recording.places import user_place
from gaverify.audit.recording.precision import Roundoff
from gaverify.audit.recording.ranks import OwnGradients, leave_together, local_shapes, shards_of
from gaverify.audit.recording.storage import Storage, leave
from gaverify.audit.recording.update import Forward, Update
from gaverify.audit.recording.values import out_of_sight, undisturbed
from gaverify.audit.recording.watching import Watch
from gaverify.passes.wrappers import engine_of, flattened, tensor_parallel
from gaverify.ranks.traffic import TrafficMeter
from gaverify.records.events import Ending, Event, Kind
from gaverify.tracebacks import Place


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
        self._averages = Followers(self.watch, job.role in ("full", "accumulated", "events"))
        self._changes = Changes(self.watch, self._event, self._averages, hunting=job.by_hand)
        self._in_forward = self._in_backward = self._complete = False
        self._targets: list[tuple[torch.Tensor, int]] = []
        self._perturbation = Perturbation(job.unit, job.coins) if job.role == "perturbed" else None
        self._lead = Lead(
            Path(job.source) if job.source and job.lead and job.role in ("accumulated", "perturbed") else None
        )
        self._reach, self._forwards = Reach(), list[Forward]()
        self._weight = Weight()
        self._numbers = {"forward": 0, "backward": 0}
        self._used: set[int] = set()  # backward passes that a step has used
        self._outer: Any = None  # the optimizer whose step is running
        self._inner: list[Any] = []  # optimizers whose steps are running as a part of that one
        self._parts: set[int] = set()  # optimizers that have stepped so: another one's parameters are theirs
        self.left_out: dict[str, int] = {}
        self.elsewhere = 0  # backward passes that reached no parameter
        self.rank, self.ranks = 0, 1
        self._setter: Place | None = None  # the user's line that writes gradients in a backward pass
        self._closed = False
        self._buffers = Buffers(Path(job.source) if job.source else None)
        self._meter = TrafficMeter()
        self._own = OwnGradients() if job.ranked else None
        self._addends: dict[int, dict[int, int]] = {}  # of each optimizer, as at its last step
        self._gathers: list[Place | None] = []  # where trained tensors were gathered since the last backward pass
        self._held = Held() if job.role == "frozen" else None
        self._draws = draws_of(job, self.roundoff.arithmetic, storage.folder)
        if job.term or job.outputs:
            keep_lines()
        self._outputs: Outputs | None = None
        self._holding: Holding | None = None
        self._listen_to(1)
        if job.math_kernels:
            use_math_kernels()

    @property
    def off(self) -> bool:
        """Whether a call is none of the recorder's business: its own, a line search's, or one in a worker process.

        Nor can a call be recorded whose tensors have no values; those are counted by what hides them.
        """
        if self._busy or self._searching is not None or os.getpid() != self.storage.process:
            return True
        why = out_of_sight()
        if why:
            self.left_out[why] = self.left_out.get(why, 0) + 1
        return bool(why)

    def finish(self, reason: Ending, status: int, code: str = "") -> None:
        """Writes everything and ends the process; one that failed waits for no other rank.

        Args:
            reason: Why it ends.
            status: Its exit status.
            code: What the script gave `sys.exit`, as Python writes it.
        """
        with self._lock:
            self.close(reason, code)
            if self.job.meeting is not None and not status:
                leave_together(self.job.meeting, self.rank, self.ranks)
            leave(status)

    def close(self, reason: Ending, code: str = "") -> None:
        """Writes everything, once; nothing is recorded any more."""
        with self._work():
            if self._closed:
                return
            self._closed = True
            self._changes.settle()
            self._changes.note_averages()
            self._close_update()
            self._event("end", reason=reason.value)
            self.storage.finish({**self._meta(reason), "status": code})

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Runs the recorder's own code: one thread at a time, unrecorded, its failures never the script's."""
        with self._lock:
            before, self._busy = self._busy, True
            try:
                with undisturbed():
                    yield
            except Exception as error:
                self.storage.give_up(error)
            finally:
                self._busy = before or self._closed

    def _begin(self) -> None:
        """A new forward or backward: what was done after the last step is over."""
        self._changes.settle()
        self._changes.note_averages()
        self._changes.note_settings()
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
        if self._outputs is not None:
            self.storage.tensors("outputs", self._outputs.forwards)
        if self._holding is not None:
            own = {at: self._holding.own(self.watch.parameters(at)) for at in range(len(self.watch))}
            self.storage.tensors("held", self._holding.kept() if self.job.source is None else own)
        self._listen_to(number + 1)
        self._draws.close(number)
        open_forwards = [forward for entry in self.watch.entries() for forward in entry.forwards]
        oldest = min(open_forwards, default=self._numbers["forward"])
        self._forwards = [forward for forward in self._forwards if forward.number >= oldest]
        self._update = Update(number + 1)

    def _listen_to(self, update: int) -> None:
        """Begins to listen to modules, or to hold code, where it is this update's that are asked for; else ends it."""
        job, this = self.job, update == self.job.at
        source = Path(job.source) if job.source else None
        self._outputs = Outputs(self._work, job.moved, small=job.role != "full") if job.outputs and this else None
        self._holding = Holding(self._work, job.held, source, job.spots) if job.held and this else None

    def _event(self, kind: Kind, place: tuple[Any, Any] | None = None, **values: Any) -> None:
        file, line = place or user_place() or (None, None)
        self.storage.event(Event(kind, self._update.number, file, line, values))

    def _stop(self) -> None:
        self.finish(Ending.UPDATES, 0)

    def _meta(self, reason: Ending) -> dict[str, Any]:
        return {
            **self._draws.summary(),
            "reason": reason.value,
            "left_out": self.left_out,
            "elsewhere": self.elsewhere,
            "processes": started_processes(),
            "rank": self.rank,
            "ranks": self.ranks,
            "shards": [shards_of(self.watch.parameters(index)) for index in range(len(self.watch))],
            "local": [local_shapes(self.watch.parameters(index)) for index in range(len(self.watch))],
            "addends": [self._addends.get(index, {}) for index in range(len(self.watch))],
            "flattened": flattened(self.names.models),
            "engine": engine_of(self.names.models),
            "tensor_parallel": tensor_parallel(self.names.models, self.watch.all_parameters()),
            "updates": self._update.number - 1,
            "setter": self._setter,
            "unit": self.roundoff.unit,
            "working": self.roundoff.describe(),
            "modules": [type(model).__name__ for model in self.names.models],
            "parameters": [
                [
                    (self.names.key(parameter, index, ordinal), list(_shape(parameter)))
                    for ordinal, parameter in enumerate(
                        self.watch.parameters(index) if index not in self._parts else ()
                    )
                ]
                for index in range(len(self.watch))
            ],
            "optimizers": [type(self.watch.of(index).optimizer).__name__ for index in range(len(self.watch))],
            "torch": torch.__version__,
        }


def started_processes() -> int:
    """Returns how many processes the script has started by `multiprocessing` so far; workers of loaders are some."""
    counter = getattr(multiprocessing.process, "_process_counter", None)
    return 0 if counter is None else next(copy.copy(counter)) - 1


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns a parameter's shape; a lazy module's has none before its first forward."""
    return () if is_lazy(parameter) else tuple(parameter.shape)
