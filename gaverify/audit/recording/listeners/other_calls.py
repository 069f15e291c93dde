"""Calls of which the time, the line or a number matters: clearing, clipping, schedulers, averages, files."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import AveragedModel

from gaverify.audit.recording.bus import Bus, FunctionCall, Nesting, announce_calls
from gaverify.audit.recording.calls import Recording
from gaverify.audit.recording.values import plain
from gaverify.audit.recording.watching import rates_of
from gaverify.passes.calls import walk_from
from gaverify.records.events import AverageUpdate, Clipping, FileLoaded, ScalerCall, SchedulerStep, ZeroGrad
from gaverify.tracebacks import user_place

# Calls that change gradients on purpose: clearing, clipping, and the calls of a `GradScaler`.


@dataclass
class ZeroGradCall(FunctionCall):
    """`zero_grad` of an optimizer or a module."""


class ZeroGradListener:
    """Notes which optimizers lose their gradients in a call of `zero_grad`.

    Args:
        recording: The objects that listeners share.
        settle: Records steps that the script has made itself until now.
    """

    def __init__(self, recording: Recording, settle: Callable[[], None]) -> None:
        self._recording, self._settle = recording, settle

    def listen(self, bus: Bus) -> None:
        """Patches torch and subscribes."""
        owner: Any
        for owner in (Optimizer, nn.Module):
            announce_calls(bus, owner, "zero_grad", lambda *_, **__: ZeroGradCall())
        bus.before(ZeroGradCall, self.look)
        bus.after(ZeroGradCall, self.note)

    def look(self, _: ZeroGradCall) -> None:
        """Records what changed before the call, which would otherwise count as the call's work."""
        self._settle()
        recording = self._recording
        recording.unannounced.note(recording.watch.look(), recording.phase.outside_forwards)

    def note(self, _: ZeroGradCall) -> None:
        """Writes which gradients are gone."""
        recording = self._recording
        cleared = recording.watch.look().cleared
        recording.watch.forget(cleared)
        recording.journal.add(ZeroGrad(*recording.journal.stamp(), optimizers=tuple(cleared)))


@dataclass
class ClipCall(FunctionCall):
    """A call of one of torch's clipping functions."""

    name: str = ""
    limit: float | None = None
    norm: Any = None


class ClippingListener:
    """Notes clippings: whether they changed a gradient, by which norm and limit.

    Args:
        recording: The objects that listeners share.
        hunt: Goes on to look for the lines of changes, which the call has ended.
    """

    def __init__(self, recording: Recording, hunt: Callable[[ClipCall], None]) -> None:
        self._recording, self._hunt = recording, hunt

    def listen(self, bus: Bus) -> None:
        """Patches torch and subscribes."""
        nesting = Nesting()  # `clip_grad_norm_` calls `clip_grads_with_norm_`
        for name in ("clip_grads_with_norm_", "clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
            if hasattr(clip_grad, name):  # versions of torch differ in their names
                announce_calls(bus, clip_grad, name, partial(_describe_clipping, getattr(clip_grad, name)), nesting)
                # `torch.nn.utils` has imported the functions by name, and scripts call them there.
                setattr(torch.nn.utils, name, getattr(clip_grad, name))
        bus.before(ClipCall, self.look)
        bus.after(ClipCall, self.note)

    def look(self, _: ClipCall) -> None:
        """Keeps the gradients that the call may clip: clipping hides a wrong scale."""
        recording = self._recording
        look = recording.watch.look()
        recording.unannounced.note(look, "between")
        recording.watch.keep_unclipped(look)

    def note(self, call: ClipCall) -> None:
        """Writes what the call changed."""
        watch, journal = self._recording.watch, self._recording.journal
        changed = watch.look().changed
        for index in changed:
            watch.of(index).clipped = True
        norm = call.norm if call.result is None else call.result  # `clip_grads_with_norm_` is given the norm
        norm = float(norm) if isinstance(norm, torch.Tensor) else norm
        event = Clipping(
            *journal.stamp(), tuple(sorted(changed)), call.name, active=bool(changed), norm=norm, limit=call.limit
        )
        journal.add(event)
        self._hunt(call)


def _describe_clipping(function: Callable[..., Any], *args: Any, **kwargs: Any) -> ClipCall:
    arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    limit = arguments.get("max_norm", arguments.get("clip_value"))
    # A tensor as limit is not read: that would wait for its device.
    limit = float(limit) if isinstance(limit, (int, float)) else None
    return ClipCall(name=function.__name__, limit=limit, norm=arguments.get("total_norm"))


@dataclass
class UnscaleCall(FunctionCall):
    """`GradScaler.unscale_`, by the script or inside `GradScaler.step`."""


@dataclass
class ScalerMethodCall(FunctionCall):
    """A method of an enabled `GradScaler` that the script calls."""

    name: str = ""


class ScalerListener:
    """Notes the calls of a `GradScaler`, and which of its steps were skipped because of infinities.

    Args:
        recording: The objects that listeners share.
        count_steps: Returns how many steps optimizers have made.
    """

    def __init__(self, recording: Recording, count_steps: Callable[[], int]) -> None:
        self._recording, self._count_steps = recording, count_steps
        self._steps_before = 0
        self._place: Any = None

    def listen(self, bus: Bus) -> None:
        """Patches torch and subscribes."""

        def describe(name: str, scaler: Any, *_: Any, **__: Any) -> ScalerMethodCall | None:
            return ScalerMethodCall(name=name) if scaler.is_enabled() else None

        announce_calls(
            bus, GradScaler, "unscale_", lambda scaler, *_, **__: UnscaleCall() if scaler.is_enabled() else None
        )
        nesting = Nesting()  # `step` calls `unscale_` itself
        for name in ("unscale_", "step", "update"):
            announce_calls(bus, GradScaler, name, partial(describe, name), nesting)
        bus.after(UnscaleCall, self.keep_unscaled)
        bus.before(ScalerMethodCall, self.look)
        bus.after(ScalerMethodCall, self.note)

    def keep_unscaled(self, _: UnscaleCall) -> None:
        """Keeps the gradients as they are without the scale."""
        self._recording.watch.keep_unclipped(self._recording.watch.look())

    def look(self, _: ScalerMethodCall) -> None:
        """Records what changed before the call."""
        self._recording.unannounced.note(self._recording.watch.look(), "between")
        self._steps_before, self._place = self._count_steps(), user_place()

    def note(self, call: ScalerMethodCall) -> None:
        """Writes the call; a step that no optimizer made was skipped, and its gradients are gone."""
        watch, journal = self._recording.watch, self._recording.journal
        watch.look()  # `update` and `unscale_` change gradients; no script's line did
        skipped = call.name == "step" and self._count_steps() == self._steps_before
        journal.add(ScalerCall(*journal.stamp(self._place), call=call.name, skipped=skipped))
        if skipped:
            watch.forget(range(len(watch)))


# Calls of which only the time and the line matter, or a number: schedulers, averages, files, targets of losses.


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
        recording: The objects that listeners share.
        folder: The folder of this run, beside those of the audit's other runs.
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
