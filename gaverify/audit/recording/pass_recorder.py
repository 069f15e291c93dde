"""Records the forward and backward passes of a training script: what they read, draw, add to the gradients and send."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gaverify.audit.recording.control import shrunk
from gaverify.audit.recording.graph import ends_in_parameters
from gaverify.audit.recording.names import OutOfSight
from gaverify.audit.recording.places import user_place
from gaverify.audit.recording.ranks import frozen, owners_of, place_in_group, synchronised
from gaverify.audit.recording.rows import input_rows, input_shapes
from gaverify.audit.recording.session import Session
from gaverify.audit.recording.terms import Terms
from gaverify.audit.recording.update import Forward
from gaverify.audit.recording.values import out_of_sight, plain
from gaverify.audit.recording.watching import Increment, Seen
from gaverify.ranks.traffic import TrafficMeter
from gaverify.records.ranks import Collective
from gaverify.tracebacks import LineHunt, Owner, Place


class PassRecorder(Session):
    """The forward and backward passes of the script, each with what is noted before and after it."""

    @contextmanager
    def forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[Callable[[Any], None]]:
        """Surrounds the forward of an outermost module; gives a function that is to be called with its result."""
        trains = torch.is_grad_enabled()
        with self._work():
            try:
                trains = trains and self.names.add(module)
            except OutOfSight:
                trains = False
                self.left_out["modules without values"] = self.left_out.get("modules without values", 0) + 1
            if trains:
                self._before_forward(module, args, kwargs)
        number = self._numbers["forward"]
        self._in_forward = True
        try:
            with (
                self._draws.in_forward(module if trains else None),
                self._as_a_control(module),
                self._listening(module, args, kwargs) if trains else nullcontext(),
            ):
                yield lambda output: self._reach.listen(output, number) if trains else None
        finally:
            self._in_forward = False
            if trains:
                with self._work():
                    self._changes.note(self.watch.look(), "forward")
                    self._draws.leave_forward()

    def inside_forward(self) -> bool:
        """Whether a forward is running, or recomputed; inner modules tell whether autocast is on."""
        if self._in_forward and self.roundoff.open:
            self.roundoff.look_at_autocast()
        return self._in_forward or self._in_backward

    @contextmanager
    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Surrounds a backward pass.

        Args:
            tensors: What is differentiated.
            args: What else the call was given.
            kwargs: The same, by name.
        """
        with self._work():
            self._begin()
            self._goes_on()
            self._draws.enter_backward()
            self.watch.let_go()
            if self.job.cleared:
                self.watch.clear()
            self._reach.begin()
            if self.job.role in ("events", "accumulated"):
                self._weight.begin(tensors)
            if self._own is not None:
                for entry in self.watch.entries():
                    self._own.listen(entry.index, entry.sample)
            place, self._in_backward = user_place(), True
            terms = Terms(tensors)
            met = [] if self._outputs is None else [*self._outputs.meetings(tensors), *filter(None, [terms.made])]
            if self._holding is not None:
                self._holding.differentiated(tensors)
        try:
            with (
                self._draws.in_backward(),
                self._shrunk(tensors),
                self._alone(terms),
                self._synchronised(),
                self._counted(),
                self._setters(),
            ):
                yield
        finally:
            self._in_backward = False
        with self._work():
            self._after_backward(place, tensors, terms, met)

    def targets(self, valid: torch.Tensor, total: int) -> None:
        """Notes how many targets of a loss count; read at the next backward."""
        if not self.off and torch.is_grad_enabled() and plain(valid) is not None:
            self._targets.append((valid, total))

    def gathered(self) -> None:
        """Notes that a tensor that needs a gradient is gathered from all ranks; read at the next backward."""
        if not self.off:
            self._gathers.append(user_place())

    # -- what lies behind them ---------------------------------------------------------------------------------------

    def _shrunk(self, tensors: Any) -> AbstractContextManager[None]:
        own = self.job.shares[place_in_group()[0]] if self.job.shares else (1.0,)
        factor = self.job.shrink * own[self._numbers["backward"] % len(own)]
        return nullcontext() if factor == 1.0 else shrunk(tensors, factor)

    def _alone(self, terms: Terms) -> AbstractContextManager[None]:
        """What a backward pass runs in where the run is a control that differentiates one term of each loss."""
        return terms.only(self.job.term) if self.job.term else nullcontext()

    @contextmanager
    def _setters(self) -> Iterator[None]:
        """Looks for the user's line that writes gradients while a backward pass runs, where a run asks for it."""
        hunt = LineHunt(lambda _: self._busy_with(self.watch.edited), Owner.USER)
        if self.job.cleared and self._setter is None and sys.gettrace() is None:
            hunt.start()
        try:
            yield
        finally:
            hunt.stop()
            self._setter = self._setter or hunt.found

    def _busy_with(self, question: Callable[[], bool]) -> bool:
        with self._work():
            return question()

    @contextmanager
    def _listening(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """What a forward runs in where a run looks for what couples samples, or holds it."""
        with ExitStack() as stack:
            if self._holding is not None:
                stack.enter_context(self._holding.listening(module, args, kwargs))
            if self._outputs is not None:
                stack.enter_context(self._outputs.listening(module, args, kwargs))
            yield

    def _as_a_control(self, module: nn.Module) -> AbstractContextManager[None]:
        """What a forward runs in where a run is a control of ranks: DDP asks in its forward whether it shall reduce."""
        if self.job.frozen:
            buffers = [value for name, value in self.names.buffers().items() if name in self.job.frozen]
            return frozen(owners_of(buffers, self.names.models))
        return synchronised([module]) if self.job.synchronise else nullcontext()

    def _synchronised(self) -> AbstractContextManager[None]:
        return synchronised(self.names.models) if self.job.synchronise else nullcontext()

    def _counted(self) -> AbstractContextManager[Any]:
        """Counts what a backward pass sends to the other ranks, where there may be some."""
        self._meter = TrafficMeter()
        return self._meter.counting() if self.job.ranked or self.job.world is not None else nullcontext()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._begin()
        self._goes_on()
        self.roundoff.add(module)
        if self._perturbation is not None:
            self._perturbation.move([*module.parameters(), *self.watch.all_parameters()])
            self.watch.look()
        if self.job.role == "full":
            self._buffers.know(self.names.buffers())
        shapes = input_shapes(args, kwargs)
        rows = next((shape[0] for shape in shapes), None)
        model = self.names.index(module)
        self._numbers["forward"] += 1
        number = self._numbers["forward"]
        self._event("forward", rows=rows, model=model, number=number)
        prints = input_rows(args, kwargs) if self.job.role != "events" else {}
        weights = {entry.index: entry.weights for entry in self.watch.entries()}
        self._forwards.append(Forward(number, self._update.number, len(self._update.rows), weights))
        self._update.rows.append(prints)
        self._draws.begin((model, module.training, len(shapes)), shapes, prints)

    def _goes_on(self) -> None:
        """A forward or backward pass begins: what was done by hand since the last call belongs to the open window."""
        seen = self.watch.look()
        self._changes.note(seen, "between")
        self._changes.note_edits(seen)

    def _after_backward(self, place: Place | None, roots: Any, terms: Terms, met: Sequence[Place]) -> None:
        seen, reached, weight = self.watch.look(), self._reach.end(), self._weight.end()
        touched = [index for index, change in seen.changed.items() if bool(change.any())]
        if not touched and not ends_in_parameters(roots):
            self.elsewhere += 1
            return
        self._numbers["backward"] += 1
        number = self._numbers["backward"]
        # A pass that adds nothing, of a micro-batch without targets, may be any optimizer's.
        for entry in [self.watch.of(index) for index in touched] or self.watch.entries():
            change = seen.changed.get(entry.index)
            if self._own is not None and (own := self._own.take(entry.index)) is not None:
                change = own
            entry.pending += change is not None and entry.index in touched
            entry.increments.append(Increment(number, torch.zeros_like(entry.gradients) if change is None else change))
            entry.forwards |= set(reached)
        for entry in self.watch.entries():
            if entry.pending:
                entry.keep()
                entry.clipped = False
        targets = [(int(valid), total) for valid, total in self._targets]
        self._targets.clear()
        told: dict[str, Any] = {"weight": weight} if weight is not None and self.job.role == "events" else {}
        # Targets tell what a mean over them is divided by; a sum of losses may be divided by anything.
        if self._weight.counted is not None and (self._weight.of_a_sum or not targets):
            told["counted"] = self._weight.counted
        if len(terms):
            told["terms"] = len(terms)
        if met:
            told["met"] = met
        if self.job.term:
            told["term"] = terms.place(self.job.term)
        self._event("backward", place, touched=touched, targets=targets, forwards=reached, **told, **self._sent())
        self._changes.note(Seen(moved=seen.moved), "backward")
        self._changes.hunt(self._quiet_difference)

    def _sent(self) -> dict[str, Any]:
        """What the backward pass sent: bytes of whole gradients that were reduced, of everything, and the calls."""
        for dtype in self._meter.reduced_in:
            self.roundoff.arithmetic.dtypes.add(dtype)
        if not self.job.ranked:
            return {}
        sizes, traffic = self._meter.sizes, self._meter.traffic
        counts = {kind.value: count for kind, count in traffic.counts.items()}
        reduced = sizes[Collective.REDUCE] + sizes[Collective.SCATTER]
        gathers, self._gathers = self._gathers, []
        told = {"gathers": gathers} if gathers else {}
        return {"reduced": reduced, "sent": traffic.bytes_moved, "collectives": counts, **told}

    def _quiet_difference(self, place: Place) -> bool:
        if out_of_sight():
            return False
        with self._work():
            return self._changes.differ()
