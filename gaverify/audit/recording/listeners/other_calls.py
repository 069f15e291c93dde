"""Calls of which only the time and the line matter, or a number: schedulers, averages, files, targets of losses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from gaverify.audit.recording.bus import Bus, FunctionCall, Nesting, announce_calls
from gaverify.audit.recording.context import Recording
from gaverify.audit.recording.values import plain
from gaverify.audit.recording.watching import rates_of
from gaverify.passes.walks import walk_from
from gaverify.records.events import AverageUpdate, FileLoaded, SchedulerStep


@dataclass
class AverageCall(FunctionCall):
    """`AveragedModel.update_parameters`."""


class AverageListener:
    """Notes updates of averaged weights."""

    def __init__(self, recording: Recording) -> None:
        self._journal = recording.journal

    def listen(self, bus: Bus) -> None:
        """Patches torch and subscribes."""
        announce_calls(bus, AveragedModel, "update_parameters", lambda *_, **__: AverageCall())
        bus.after(AverageCall, self.note)

    def note(self, _: AverageCall) -> None:
        """Writes the call."""
        self._journal.add(AverageUpdate(*self._journal.stamp()))


@dataclass
class SchedulerCall(FunctionCall):
    """`step` of a learning-rate scheduler."""

    scheduler: Any = None


class SchedulerListener:
    """Notes steps of learning-rate schedulers, of torch's classes and of the script's own."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def listen(self, bus: Bus) -> None:
        """Patches `step` of every scheduler class, those of the script as they are defined, and subscribes."""
        # A scheduler that is made of others calls their steps, and each steps once while it is made.
        nesting = Nesting()
        base: Any = lr_scheduler.LRScheduler

        def wrap(kind: Any) -> None:
            if "step" in vars(kind):
                announce_calls(bus, kind, "step", lambda self, *_, **__: SchedulerCall(scheduler=self), nesting)

        def init_subclass(kind: Any, **kwargs: Any) -> None:
            super(base, kind).__init_subclass__(**kwargs)
            wrap(kind)

        for scheduler_class in walk_from([base], type.__subclasses__):
            wrap(scheduler_class)
        announce_calls(bus, base, "_initial_step", lambda *_: FunctionCall(), nesting)  # to which nobody subscribes
        base.__init_subclass__ = classmethod(init_subclass)  # type: ignore[arg-type]
        bus.after(SchedulerCall, self.note)

    def note(self, call: SchedulerCall) -> None:
        """Writes the step; the settings that it changed were not set by hand."""
        journal, rates = self._recording.journal, tuple(rates_of(call.scheduler.optimizer))
        journal.add(SchedulerStep(*journal.stamp(), scheduler=id(call.scheduler), lr=rates))
        self._recording.unannounced.accept_settings()


@dataclass
class LoadCall(FunctionCall):
    """`torch.load` of a file."""

    path: str = ""


class LoadListener:
    """Notes the files that `torch.load` reads: a run that starts from other weights may have resumed.

    Args:
        recording: What listeners share.
        folder: Of this run, beside those of the audit's other runs.
    """

    def __init__(self, recording: Recording, folder: Path) -> None:
        self._journal = recording.journal
        self._audit_folder = os.path.join(os.path.dirname(os.path.abspath(folder)), "")

    def listen(self, bus: Bus) -> None:
        """Patches torch and subscribes."""
        announce_calls(bus, torch, "load", self._describe)
        bus.before(LoadCall, self.note)

    def note(self, call: LoadCall) -> None:
        """Writes the path."""
        self._journal.add(FileLoaded(*self._journal.stamp(), path=call.path))

    def _describe(self, f: Any, *_: Any, **__: Any) -> LoadCall | None:
        path = os.path.abspath(os.fspath(f)) if isinstance(f, str | os.PathLike) else self._audit_folder
        # A file of the audit's other runs is no checkpoint of the script.
        return None if path.startswith(self._audit_folder) else LoadCall(path=path)


@dataclass
class LossCall(FunctionCall):
    """A loss over integer targets, whose valid ones are counted before it runs."""

    valid: Any = None
    total: int = 0


class TargetListener:
    """Counts the valid targets of cross entropies: the weights that an average over tokens should have."""

    def __init__(self) -> None:
        self._counts: list[tuple[torch.Tensor, int]] = []

    def listen(self, bus: Bus) -> None:
        """Patches torch and subscribes."""
        # The modules of these losses call the functions: patching those counts both.
        for name in ("cross_entropy", "nll_loss"):
            announce_calls(bus, functional, name, _describe_loss)
        bus.before(LossCall, self.note)

    def note(self, call: LossCall) -> None:
        """Keeps the count on its device: reading it here would wait for that."""
        # A count on the meta device or in a transform of `torch.func` is no number.
        if plain(call.valid) is not None:
            self._counts.append((call.valid, call.total))

    def read(self) -> tuple[tuple[int, int], ...]:
        """Returns valid and all targets of each loss since they were taken."""
        return tuple((int(valid), total) for valid, total in self._counts)

    def clear(self) -> None:
        """Forgets the losses: a backward pass has differentiated them."""
        self._counts.clear()


def _describe_loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> LossCall | None:
    ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
    # A loss that is only looked at, in an evaluation, belongs to no backward pass.
    if not torch.is_grad_enabled() or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    return LossCall(valid=(target.detach() != ignored).sum(), total=target.numel())
