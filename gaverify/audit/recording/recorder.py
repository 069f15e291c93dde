"""Records what a training script does, call by call: what it reads, draws, adds to the gradients, sends and clips.

The script's own code runs between the two halves of each method here; nothing of it is changed: generators, gradients,
weights (but in the runs that move or hold them on purpose) and exceptions pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gaverify.audit.recording.frameworks import find_framework
from gaverify.audit.recording.graph import Terms, ends_in_parameters
from gaverify.audit.recording.listeners.gradient_calls import ClippingListener, ScalerListener, ZeroGradListener
from gaverify.audit.recording.listeners.other_calls import AverageListener, LoadListener, SchedulerListener
from gaverify.audit.recording.rows import input_rows, input_shapes
from gaverify.audit.recording.samples import has_loss
from gaverify.audit.recording.steps import Steps
from gaverify.audit.recording.unannounced import CERTAIN, ByHand, Waiting
from gaverify.audit.recording.values import OutOfSight, out_of_sight
from gaverify.audit.recording.watching import Look
from gaverify.collective.traffic import TrafficMeter
from gaverify.records.events import (
    Backward,
    Ending,
    Forward,
    LossOrigin,
)
from gaverify.records.ranks import Collective, Traffic
from gaverify.tracebacks import Place, user_place


class Recorder(Steps):
    """All calls of the script, each with what is noted before and after it."""

    def subscribe(self) -> None:
        """Lets all listeners patch torch and subscribe to calls."""
        self._targets.listen(self.bus)
        ZeroGradListener(self.recording, self._settle_by_hand).listen(self.bus)
        ClippingListener(self.recording, self._keep_used).listen(self.bus)
        ScalerListener(self.recording, lambda: self.steps).listen(self.bus)
        SchedulerListener(self.recording).listen(self.bus)
        AverageListener(self.recording).listen(self.bus)
        LoadListener(self.recording, self.storage.folder).listen(self.bus)

    @contextmanager
    def forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[Callable[[Any], None]]:
        """Surrounds the forward of an outermost module; gives a function that is to be called with its result."""
        graded = torch.is_grad_enabled()
        with self._loop.ignore_draws():
            if self.by_hand:  # there is no optimizer that would be made
                self._loop.start()
            with self.work():
                if graded:
                    self._loop.forward(next((shape[0] for shape in input_shapes(args, kwargs)), None))
                    if self._inputs is not None:
                        self._inputs.forward(module, args, kwargs)
                trains = graded and self._trains(module)
                if trains:
                    self._before_forward(module, args, kwargs)
            number, listens = self._numbers["forward"], trains and self._is_last_update
            pinned, outputs = (self.pinned_modules, self.outputs) if listens else (None, None)

            def listen(output: Any) -> None:
                if trains:
                    self._reach.listen(output, number)
                self._returns_loss = self._returns_loss and (not graded or has_loss(output))

            self._phase.in_forward = True
            try:
                with (
                    self.state.around(module, self.names.prefix(module)) if graded and self.state else nullcontext(),
                    self.draws.in_forward(module) if trains else nullcontext(),
                    self.control.forward(module),
                    pinned.listening(module, args, kwargs) if pinned is not None else nullcontext(),
                    outputs.listening(module, args, kwargs) if outputs is not None else nullcontext(),
                ):
                    yield listen
            finally:
                self._phase.in_forward = False
                if trains:
                    with self.work():
                        self._unannounced_changes.note(self.watch.look(), "forward")
                        self.draws.leave_forward()

    def inside_forward(self) -> bool:
        """Whether a forward is running, or recomputed; inner modules tell whether autocast is on."""
        if self._phase.in_forward and self.roundoff.open:
            self.roundoff.look_at_autocast()
        return self._phase.in_forward or self._phase.in_backward

    @contextmanager
    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Surrounds a backward pass.

        Args:
            tensors: What is differentiated.
            args: What else the call was given.
            kwargs: The same, by name.
        """
        with self._loop.ignore_draws():
            with self.work():
                place = self._differentiates()
                self._begin()
                self._goes_on()
                self.draws.enter_backward()
                self.watch.let_go()
                if self.clearing is not None:
                    self.clearing.clear()
                if self.job.role != "full" or self.job.is_reference:
                    self._weight.begin(tensors)
                for entry in self.watch:
                    self._incoming.listen(entry)
                terms, self._meter = Terms(tensors), TrafficMeter()
                origin = self.control.describe(terms, place)
                if self.outputs is not None and self._is_last_update:
                    origin = replace(
                        origin,
                        met=(*self.outputs.meetings(tensors), *filter(None, [terms.loss_line])),
                        inside=tuple(self.outputs.inside(tensors)),
                        custom=tuple(self.outputs.custom_functions(tensors)),
                    )
                if self.pinned_modules is not None and self._is_last_update:
                    self.pinned_modules.note_differentiation(tensors)
            try:
                with (
                    self.draws.in_backward(),
                    self.control.backward(tensors, self._numbers["backward"], terms),
                    self._meter.counting() if self.job.counts_traffic else nullcontext(),
                    self.clearing.find_setter(self.work) if self.clearing is not None else nullcontext(),
                ):
                    yield
            finally:
                self._phase.in_backward = False
            with self.work():
                self._after_backward(place, tensors, terms, origin)
            self._end_pass()

    @contextmanager
    def differentiation(self, outputs: Any, inputs: Sequence[Any]) -> Iterator[Callable[[Sequence[Any]], None]]:
        """Surrounds a call of `autograd.grad` for parameters; gives a function to be called with its result."""
        results: list[Any] = []
        with self._loop.ignore_draws():
            with self.work():
                place = self._differentiates()
            try:
                with self.draws.in_backward(), self.control.differentiation(outputs, self._numbers["backward"]):
                    yield results.extend
            finally:
                self._phase.in_backward = False
            with self.work():
                targets = self._targets.read()
                changes = self._sample_results(inputs, results)
                if changes:
                    self._waiting.append(Waiting(place, self._reach.peek(), targets, changes))
                self._unannounced_changes.hunt(self._quiet_difference)
            self._end_pass()

    def note_gather(self) -> None:
        """Notes that a tensor that needs a gradient is gathered from all ranks; read at the next backward."""
        if not self.guard.off:
            self._gathers.append(user_place())

    # -- what lies behind them ---------------------------------------------------------------------------------------

    def _trains(self, module: nn.Module) -> bool:
        try:
            return self.names.add(module)
        except OutOfSight:
            self.guard.leave_out("modules without values")
            return False

    def _differentiates(self) -> Place | None:
        """Something is about to be differentiated; returns the line."""
        self._settle_by_hand()
        self._unannounced_steps.note_differentiation()
        self._reach.begin()
        self._phase.in_backward = True
        return user_place()

    def _end_pass(self) -> None:
        """A backward pass is over, whatever it was for."""
        self._loop.backwards += 1
        if self.state is not None:
            self.state.end_micro_batch()
        if self._inputs is not None:
            self._inputs.after_backward()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._settle_by_hand()
        watched_ids = {id(parameter) for parameter in self.watch.all_parameters()}
        new = [parameter for parameter in module.parameters() if id(parameter) not in watched_ids]
        if self.by_hand:
            trained = [parameter for parameter in new if parameter.requires_grad]
            if trained:
                self.watch.add(ByHand(trained))
        elif not self.steps:
            has_optimizer = len(new) < len(list(module.parameters()))
            self._unannounced_steps.look(module, has_optimizer=has_optimizer)
            if (self._unannounced_steps.windows if has_optimizer else self._unannounced_steps.moves) >= CERTAIN:
                self.finish(Ending.BY_HAND, 0)
        self._begin()
        self._goes_on()
        self.roundoff.add(module)
        if self.perturbation is not None:
            self.perturbation.move([*module.parameters(), *self.watch.all_parameters()])
            self.watch.look()
        if self.job.is_reference:
            self._buffers.remember(self.names.buffers(of_losses=True))
        shapes = input_shapes(args, kwargs)
        rows = next((shape[0] for shape in shapes), None)
        model = self.names.index(module)
        self._numbers["forward"] += 1
        number = self._numbers["forward"]
        self._journal.add(Forward(*self._journal.stamp(), rows=rows, model=model, number=number))
        prints = input_rows(args, kwargs) if self.job.role != "events" else {}
        self._forwards[number] = self._update.number, len(self._update.rows)
        self._update.rows.append(prints)
        self.draws.begin((model, module.training, len(shapes)), shapes, prints)
        if self.by_hand and self.perturbation is not None:
            for entry in self.watch:
                entry.optimizer.take()  # moved by their roundoff: no step of the script's

    def _goes_on(self) -> None:
        """A forward or backward pass begins: what was done by hand since the last call belongs to the open window."""
        look = self.watch.look()
        self._unannounced_changes.note(look, "between")
        self._unannounced_changes.note_edits(look)

    def _after_backward(self, place: Place | None, roots: Any, terms: Terms, origin: LossOrigin) -> None:
        look, reached, weight = self.watch.look(), self._reach.end(), self._weight.end()
        incoming = self._incoming_gradients(look)
        touched = sorted({*self._touched_optimizers(look), *(() if self.job.has_ranks else incoming)})
        if not touched and not ends_in_parameters(roots):
            self.elsewhere += 1
            return
        self._numbers["backward"] += 1
        number = self._numbers["backward"]
        # A pass that adds nothing, of a micro-batch without targets, may be any optimizer's.
        for entry in [self.watch.of(index) for index in touched] or [*self.watch]:
            change = incoming.get(entry.index, look.changed.get(entry.index))
            entry.pending += change is not None and entry.index in touched
            entry.receive(number, change, reached)
        for entry in self.watch:
            if entry.pending:
                entry.clipped = False
                if self.job.has_ranks or entry.index not in incoming:  # else the sum lies elsewhere
                    entry.keep()
        targets = self._targets.read()
        self._targets.clear()
        # Targets tell what a mean over them is divided by; a sum of losses may be divided by anything.
        is_counted = self._weight.of_a_sum or not targets
        traffic, reduced = self._describe_traffic()
        gathers, self._gathers = tuple(self._gathers), []
        self._journal.add(
            Backward(
                *self._journal.stamp(place),
                optimizers=tuple(touched),
                targets=targets,
                forwards=tuple(reached),
                weight=weight if self.job.role == "events" else None,
                counted=self._weight.divisor if is_counted else None,
                scales=tuple(self._weight.scales),
                loss=self._weight.value_of(roots),
                framework=find_framework(),
                terms=len(terms),
                origin=origin,
                traffic=traffic,
                reduced=reduced,
                gathers=gathers,
            )
        )
        self._unannounced_changes.note(Look(moved=look.moved), "backward")
        self._unannounced_changes.hunt(self._quiet_difference)

    def _incoming_gradients(self, seen: Look) -> dict[int, torch.Tensor]:
        """What a backward pass gave each optimizer, where `.grad` does not tell: reduced over ranks, or moved away."""
        given = {
            entry.index: self._incoming.take(entry.index)
            if self.job.has_ranks
            else self._incoming.take_moved(entry, seen)
            for entry in self.watch
        }
        return {index: gradients for index, gradients in given.items() if gradients is not None}

    def _touched_optimizers(self, look: Look) -> list[int]:
        """The optimizers whose gradients a backward pass changed."""
        changed = [index for index, change in look.changed.items() if bool(change.any())]
        # NaN stays NaN whatever is added: such a pass leaves `.grad` as it was, and is a pass all the same
        return changed or [entry.index for entry in self.watch if entry.pending and bool(entry.gradients.isnan().any())]

    def _describe_traffic(self) -> tuple[Traffic, int]:
        """Returns what the backward pass sent, and the bytes of whole gradients among it."""
        for dtype in self._meter.reduced_in:
            self.roundoff.arithmetic.dtypes.add(dtype)
        if not self.job.has_ranks:
            return Traffic(), 0
        sizes = self._meter.sizes
        return self._meter.traffic, sizes[Collective.REDUCE] + sizes[Collective.SCATTER]

    def _quiet_difference(self, place: Place) -> bool:
        """Where the script moves its weights itself, the gradients are used as the line that moves them finds them."""
        if out_of_sight():
            return False
        with self.work():
            differs = self._unannounced_changes.has_changes()
            if differs:
                self._keep_used()
            return differs

    def _keep_used(self) -> None:
        for entry in self.watch if self.by_hand else ():
            entry.keep_used()

    def _sample_results(self, inputs: Sequence[Any], results: Sequence[Any]) -> dict[int, torch.Tensor]:
        results_by_id = {
            id(tensor): result for tensor, result in zip(inputs, results, strict=False) if result is not None
        }
        return {
            entry.index: entry.sample.read([results_by_id.get(id(parameter)) for parameter in entry.sample.parameters])
            for entry in self.watch
            if any(id(parameter) in results_by_id for parameter in entry.sample.parameters)
        }
