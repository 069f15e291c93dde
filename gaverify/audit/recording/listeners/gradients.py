"""Backward passes: what each adds to the gradients of every optimizer, and the forwards that it reaches.

A gradient from `autograd.grad` may be for anything, a penalty or a norm that is only looked at. So such a pass waits:
it counts as a backward pass once a step uses gradients that no backward pass gave.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch

from gaverify.audit.recording.calls import BackwardCall, Differentiation, ForwardCall, GradCall, Recording, StepCall
from gaverify.audit.recording.graph import ForwardReach, ends_in_parameters
from gaverify.audit.recording.listeners.other_calls import TargetListener
from gaverify.audit.recording.unannounced import Waiting
from gaverify.audit.recording.watching import IncomingGradients, Look, WatchedOptimizer
from gaverify.collective.membership import TrafficMeter
from gaverify.records.events import Backward, Framework, FrameworkLoop
from gaverify.records.ranks import Collective
from gaverify.tracebacks import Place, user_place

# Collectives of backward passes, and gathers of trained tensors.


class TrafficListener:
    """Measures what each backward pass sends.

    Args:
        recording: The objects that listeners share.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._meter = TrafficMeter()
        self.differentiates_gathers = False
        """Whether gathers of trained tensors pass the gradient back, for a control."""
        self._gathers: list[Place | None] = []

    def note_gather(self) -> None:
        """Notes that a tensor that needs a gradient is gathered from all ranks."""
        if not self._recording.guard.off:
            self._gathers.append(user_place())

    def begin(self, _: BackwardCall) -> None:
        """Begins to count."""
        self._meter = TrafficMeter()

    def count(self, _: BackwardCall) -> AbstractContextManager[None]:
        """Surrounds a backward pass."""
        return self._meter.counting() if self._recording.job.is_launched else nullcontext()

    def describe(self, call: BackwardCall) -> None:
        """Describes what a pass that counts has sent."""
        if not call.is_counted:
            return
        for dtype in self._meter.reduced_in:  # a reduction in half precision rounds as a product does
            self._recording.roundoff.arithmetic.dtypes.add(dtype)
        # Gathers of a pass that does not count belong to the next one that does.
        call.gathers, self._gathers = self._gathers, []
        if self._recording.job.has_ranks:
            sizes = self._meter.sizes
            call.traffic, call.reduced = self._meter.traffic, sizes[Collective.REDUCE] + sizes[Collective.SCATTER]


# Which framework's loop runs a backward pass, read from the functions that are running.


Locals = Mapping[str, Any]
"""The local variables of a function that is running."""


class _Loop(NamedTuple):
    """A function of a framework that is running while a loss is differentiated, and how to read its settings."""

    module: str
    function: str
    read: Callable[[Locals], FrameworkLoop]


def _of_trainer(local: Locals) -> FrameworkLoop:
    trainer, items = local["self"], local.get("num_items_in_batch")
    accepts = getattr(trainer, "model_accepts_loss_kwargs", False) or getattr(trainer, "compute_loss_func", None)
    return FrameworkLoop(
        Framework.TRANSFORMERS,
        trainer.args.gradient_accumulation_steps,
        divides=not accepts or items is None,
        # Versions that count no items have no such variable.
        counts_items=items is not None if "num_items_in_batch" in local else None,
    )


def _of_accelerator(local: Locals) -> FrameworkLoop:
    return FrameworkLoop(Framework.ACCELERATE, local["self"].gradient_accumulation_steps)


def _of_lightning(local: Locals) -> FrameworkLoop:
    return FrameworkLoop(Framework.LIGHTNING, local["self"].trainer.accumulate_grad_batches)


# The Trainer comes first: it differentiates through Accelerate, which it keeps from dividing.
_LOOPS = (
    _Loop("transformers.trainer", "training_step", _of_trainer),
    _Loop("accelerate.accelerator", "backward", _of_accelerator),
    _Loop("lightning.pytorch.loops.optimization.automatic", "run", _of_lightning),
    _Loop("pytorch_lightning.loops.optimization.automatic", "run", _of_lightning),
)


def find_framework() -> FrameworkLoop | None:
    """Returns the loop of a framework that is running now; None where the script's own is, or its settings are hidden.

    Only functions that are running are looked at: a framework that is merely imported says nothing.
    """
    running: dict[tuple[str, str], FrameType] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running.setdefault((frame.f_globals.get("__name__", ""), frame.f_code.co_name), frame)
        frame = frame.f_back
    for loop in _LOOPS:
        if running_frame := running.get((loop.module, loop.function)):
            try:
                return loop.read(running_frame.f_locals)
            except (AttributeError, KeyError):  # another version, which keeps its settings elsewhere
                return None
    return None


# Backward passes: what each adds to the gradients of every optimizer, and the forwards that it reaches.


class GradientListener:
    """Follows gradients through backward passes, and writes an event for each pass.

    Args:
        recording: The objects that listeners share.
        targets: Counts the targets of losses.
    """

    def __init__(self, recording: Recording, targets: TargetListener) -> None:
        self._recording, self._targets = recording, targets
        self._incoming = IncomingGradients(always=recording.job.has_ranks)
        self._reach = ForwardReach()
        self._waiting: list[Waiting] = []
        self.count = 0
        """Backward passes so far that reached parameters."""
        self.elsewhere = 0
        """Backward passes that reached none."""

    def note_result(self, call: ForwardCall) -> None:
        """Listens for gradients that flow into the result of a forward."""
        if call.trains:
            self._reach.listen(call.result, call.number)

    def begin_differentiation(self, _: Differentiation) -> None:
        """Something is about to be differentiated."""
        self._reach.begin()

    @contextmanager
    def run_differentiation(self, _: Differentiation) -> Iterator[None]:
        """Surrounds what computes gradients; forwards in it are recomputed and not the script's."""
        phase = self._recording.phase
        phase.in_backward = True
        try:
            yield
        finally:
            phase.in_backward = False

    def begin_pass(self, _: BackwardCall) -> None:
        """Listens to the gradients of all parameters."""
        self._recording.watch.let_go()

    def listen_to_parameters(self, _: BackwardCall) -> None:
        """Listens to what arrives at the parameters, before ranks reduce it and hooks move it away."""
        for entry in self._recording.watch:
            self._incoming.listen(entry)

    def collect(self, call: BackwardCall) -> None:
        """Finds out what a pass has changed, and adds it to the windows of the optimizers."""
        watch, job = self._recording.watch, self._recording.job
        call.look, call.reached = watch.look(), self._reach.end()
        incoming = self._incoming_gradients(call.look)
        # With ranks, gradients that arrive say nothing of `.grad`: the script may reduce them later.
        call.touched = sorted({*self._touched_optimizers(call.look), *(() if job.has_ranks else incoming)})
        # The loss of a micro-batch without valid targets changes no gradient, and is one of the window all the same.
        call.is_counted = bool(call.touched) or ends_in_parameters(call.roots)
        if not call.is_counted:
            self.elsewhere += 1
            return
        self.count += 1
        # A pass that adds nothing, of a micro-batch without targets, may be any optimizer's.
        for entry in [watch.of(index) for index in call.touched] or [*watch]:
            change = incoming.get(entry.index, call.look.changed.get(entry.index))
            entry.pending += change is not None and entry.index in call.touched
            entry.receive(self.count, change, call.reached)
        for entry in watch:
            if entry.pending:
                entry.clipped = False
                if job.has_ranks or entry.index not in incoming:  # else the sum lies elsewhere
                    entry.keep()

    def write(self, call: BackwardCall) -> None:
        """Writes a pass that counts, and the weights that moved in it."""
        if not call.is_counted:
            return
        recording = self._recording
        recording.journal.add(
            Backward(
                *recording.journal.stamp(call.place),
                optimizers=tuple(call.touched),
                targets=call.targets,
                forwards=tuple(call.reached),
                # Elsewhere a fit tells the weights, of whatever the script does to its losses.
                weight=call.weight if recording.job.role == "events" else None,
                counted=call.divisor,
                scales=tuple(call.scales),
                loss=call.loss,
                framework=find_framework(),
                terms=len(call.terms),
                origin=call.origin,
                traffic=call.traffic,
                reduced=call.reduced,
                gathers=tuple(call.gathers),
            )
        )
        recording.unannounced.note(Look(moved=call.look.moved), "backward")

    def keep_waiting(self, call: GradCall) -> None:
        """Keeps what a call of `autograd.grad` returned until a step tells what it was for."""
        results_by_id = {
            id(tensor): result for tensor, result in zip(call.inputs, call.result, strict=False) if result is not None
        }
        changes = {
            entry.index: entry.sample.read([results_by_id.get(id(parameter)) for parameter in entry.sample.parameters])
            for entry in self._recording.watch
            if any(id(parameter) in results_by_id for parameter in entry.sample.parameters)
        }
        if changes:  # gradients of inputs alone train nothing
            self._waiting.append(Waiting(call.place, self._reach.peek(), self._targets.read(), changes))

    def begin_step(self, call: StepCall) -> None:
        """Counts passes that wait, before a step."""
        self.count_waiting(call.entry)

    def count_waiting(self, entry: WatchedOptimizer) -> None:
        """Counts the passes that wait as backward passes where no backward pass gave what the step is made of."""
        watch, journal = self._recording.watch, self._recording.journal
        # Where a backward pass gave gradients that nobody cleared, the step uses those: the others were only looked at.
        alone = all(part.cleared for part in entry.increments)
        counted = [part for part in self._waiting if entry.index in part.changes and alone]
        self._waiting = [part for part in self._waiting if entry.index not in part.changes]
        for part in counted:
            self.count += 1
            for index, change in part.changes.items():
                reached_entry = watch.of(index)
                reached_entry.pending += 1
                reached_entry.receive(self.count, change, part.reached)
            touched, reached = tuple(sorted(part.changes)), tuple(part.reached)
            journal.add(
                Backward(*journal.stamp(part.place), optimizers=touched, targets=part.targets, forwards=reached)
            )
        if counted:
            self._targets.clear()

    def _incoming_gradients(self, look: Look) -> dict[int, torch.Tensor]:
        """The gradients that a pass gave each optimizer where `.grad` has others: reduced over ranks, or moved away."""
        incoming = {
            entry.index: self._incoming.take(entry.index)
            if self._recording.job.has_ranks
            else self._incoming.take_moved(entry, look)
            for entry in self._recording.watch
        }
        return {index: gradients for index, gradients in incoming.items() if gradients is not None}

    def _touched_optimizers(self, look: Look) -> list[int]:
        """The optimizers whose gradients a pass changed."""
        changed = [index for index, change in look.changed.items() if bool(change.any())]
        # NaN stays NaN whatever is added: such a pass leaves `.grad` as it was, and is a pass all the same.
        return changed or [
            entry.index for entry in self._recording.watch if entry.pending and bool(entry.gradients.isnan().any())
        ]
