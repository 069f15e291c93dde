"""Stores a recorded run on disk: events line by line, and the gradients, weights and rows of each update.

A rank stores its own shard of a sharded parameter, and ends once all other ranks are ready to end.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from gaverify.audit.folders import DISK_FULL, META, ROOM
from gaverify.audit.recording.sketching import KeptGradients
from gaverify.audit.recording.values import plain
from gaverify.audit.recording.watching import WatchedOptimizer, counted_steps, settings_of
from gaverify.audit.same_data import ForwardInputs, StepSample
from gaverify.records.events import ClosingRecord, Event, write_closing_record, write_event
from gaverify.tracebacks import Place, user_place

_PATIENCE = 20.0  # seconds that a rank waits for the others before it ends; one of them may have failed
_LEFT = "left-{}"


class Storage:
    """Writes into the folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events = (folder / "events.jsonl").open("w", encoding="utf-8")
        self.process = os.getpid()

    def event(self, event: Event) -> None:
        """Appends an event."""
        self._events.write(write_event(event) + "\n")

    def reserve(self, tensors: Iterable[torch.Tensor], times: int) -> None:
        """Ends the process where the disk cannot take what will be stored, long before it is full.

        Args:
            tensors: The tensors that one update stores.
            times: How often it is stored, by this process and by other ranks.
        """
        wanted, free = times * bytes_of(tensors), self.free
        if free is not None and wanted > free:
            (self.folder / ROOM).write_text(json.dumps([wanted, free]), encoding="utf-8")
            leave(DISK_FULL)

    @property
    def free(self) -> int | None:
        """Bytes that are free on the disk; None where that is not known: then the disk tells when it is full."""
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return None

    def tensors(self, name: str, content: Any) -> None:
        """Writes tensors as one file, streamed from where they lie."""
        torch.save(content, self.folder / f"{name}.pt")
        self._events.flush()  # a script that is killed leaves its events up to this step

    def finish(self, record: ClosingRecord) -> None:
        """Writes the closing record; only a run that has one is complete.

        Its name appears when it is whole: the parent looks for those of the ranks while they write them.
        """
        self._events.flush()
        unfinished = self.folder / "meta.unfinished"
        unfinished.write_text(write_closing_record(record), encoding="utf-8")
        unfinished.replace(self.folder / META)


def leave(status: int) -> NoReturn:
    """Ends this process now: no handler, thread or worker of the script can hold it up."""
    for stream in (sys.stdout, sys.stderr):
        # The script may have closed its output, or replaced it by something that cannot be flushed.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)  # `sys.exit` would raise in the script, which may catch it


_BUFFER = 4096  # elements of a buffer that are kept


Forwards = Sequence[tuple[int, int]]
"""Where the rows of some forwards are stored: the number of their update, and their position in it."""


class Update:
    """Steps of different optimizers with no backward between them are one update.

    Args:
        number: From 1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: list[ForwardInputs] = []
        self._steps: dict[int, StepSample] = {}

    @property
    def steps(self) -> list[int]:
        """The optimizers that have stepped; a second step of one belongs to the next update."""
        return list(self._steps)

    def capture(
        self,
        entry: WatchedOptimizer,
        forwards: Forwards,
        moved: torch.Tensor | None = None,
    ) -> dict[str, KeptGradients]:
        """Takes what the optimizer is about to use.

        Args:
            entry: The optimizer.
            forwards: The forwards that its window's passes reached.
            moved: The sampled weights before a step that the script has made itself, which may have cleared what it
                used: then each gradient is taken as it was when its weights moved.

        Returns:
            The gradients to store; where they are no longer what the window's last backward pass left, those as well.
        """
        divisor = divisor_of(entry)
        before = entry.weights if moved is None else moved
        summed = entry.summed
        if moved is not None and summed is not None and entry.is_cleared:
            used = summed.replaced_by(entry.used)
        else:
            used = KeptGradients(entry.index, entry.sample, entry.gradients)
        if summed is not None and not summed.differs(used):
            summed = None
        from_whole = [each.sampled_from_whole for each in (used, summed or used)]
        self._steps[entry.index] = StepSample(
            final=used.sampled / divisor,
            summed=summed.sampled / divisor if summed is not None else None,
            from_whole=tuple(values / divisor for values in from_whole if values is not None),
            before=before,
            stretches=entry.sample.stretches(),
            sizes=tuple(entry.sample.sizes),
            increments=tuple((part.backward, part.change) for part in entry.increments),
            forwards=tuple(forwards),
            update=self.number,
        )
        return {"gradients": used} if summed is None else {"gradients": used, "summed": summed}

    def capture_after_step(self, entry: WatchedOptimizer, buffers: dict[str, torch.Tensor], led: bool) -> None:
        """Takes weights, settings and buffers after the step.

        Args:
            entry: The optimizer.
            buffers: The buffers of the script's models.
            led: Whether the step used the full-batch run's gradients.
        """
        self._steps[entry.index] = replace(
            self._steps[entry.index],
            weights=entry.weights,
            settings=tuple(settings_of(entry.optimizer)),
            counted=counted_steps(entry.optimizer),
            led=led,
            buffers={
                name: values.reshape(-1)[:_BUFFER].to("cpu", torch.float64)
                for name, buffer in buffers.items()
                if (values := plain(buffer)) is not None and values.layout is torch.strided and not values.is_complex()
            },
        )

    def write(self, storage: Storage, steps: dict[int, int]) -> None:
        """Writes the samples and rows of the window.

        Args:
            storage: Where to.
            steps: The number of each optimizer's step.
        """
        for optimizer, content in self._steps.items():
            storage.tensors(f"step-{optimizer}-{steps[optimizer]}", content)
        storage.tensors(f"rows-{self.number}", self.rows)


def divisor_of(entry: WatchedOptimizer) -> float:
    """Returns what a fused optimizer divides its gradients by itself: the scale of a `GradScaler`."""
    scale = getattr(entry.optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def leave_together(meeting: Path, rank: int, ranks: int) -> None:
    """Waits until every rank is ready to leave: a process that leaves earlier breaks the collectives of the others.

    Args:
        meeting: A folder that all ranks see.
        rank: The number of this one.
        ranks: How many there are.
    """
    # Files and no barrier of torch's, in which all would wait for a rank that has failed.
    (meeting / _LEFT.format(rank)).touch()
    limit = time.monotonic() + _PATIENCE
    marks = [meeting / _LEFT.format(number) for number in range(ranks)]
    while time.monotonic() < limit and not all(mark.exists() for mark in marks):
        time.sleep(0.01)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes that tensors take on the disk."""
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)


def addends_of(parameters: Sequence[torch.Tensor]) -> dict[int, int]:
    """Returns which gradients, by position, are addends of a sum still to be made, and how many ranks hold each.

    A weight that tensor parallelism keeps whole beside sharded activations has such a gradient until the step.
    """
    counts = {}
    for at, parameter in enumerate(parameters):
        gradient: Any = parameter.grad
        placements = getattr(gradient, "placements", ())
        if any(placement.is_partial() for placement in placements):
            sizes = zip(placements, gradient.device_mesh.shape, strict=True)
            # Ranks along a replicated dimension of the mesh hold the same addend, which counts once.
            counts[at] = math.prod(size for placement, size in sizes if placement.is_replicate())
    return counts


# Writes the events of a run: each with the number of its update and the script's line.


class Journal:
    """The events of one run, in order.

    Args:
        storage: Where they are written.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.update = 1
        """Number of the update that is being worked on."""

    def stamp(self, place: Place | tuple[None, None] | None = None) -> tuple[int, str | None, int | None]:
        """Returns the first three fields of an event that happens now: update, file and line.

        Args:
            place: The script's line; None for the one that is running, two None for a line that is not known.
        """
        file, line = place or user_place() or (None, None)  # a pair of None is true: it stays unknown
        return self.update, file, line

    def add(self, event: Event) -> None:
        """Writes an event."""
        self._storage.event(event)
