"""Steps of torch's optimizers, which torch's hooks announce in two halves, and what a control changes on purpose."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gaverify.audit.recording.bus import Bus
from gaverify.audit.recording.calls import BackwardCall, Differentiation, ForwardCall, GradCall, Recording, StepCall
from gaverify.audit.recording.carried import CarriedState
from gaverify.audit.recording.control import Control, GradientClearing, Lead, Perturbation
from gaverify.audit.recording.graph import Terms
from gaverify.audit.recording.listeners.forwards import DataListener
from gaverify.audit.recording.listeners.gradients import GradientListener
from gaverify.audit.recording.state import StateRestorer
from gaverify.audit.recording.values import copy_values
from gaverify.audit.recording.watching import parameters_of
from gaverify.records.events import ControlSummary
from gaverify.tracebacks import Place, user_place

# Changes of a control. Each change of a run fills the attribute that it needs; the others stay empty.


class ControlListener:
    """Changes weights, steps, losses, gradients and state for a control, and keeps state for other runs.

    Args:
        recording: The objects that listeners share.
        gradients: Counts the backward passes.
    """

    def __init__(self, recording: Recording, gradients: GradientListener) -> None:
        self._recording, self._gradients = recording, gradients
        self.carried = CarriedState(recording.names, recording.storage, recording.job.source, recording.guard.work)
        """Compares the state that an update leaves to the next one."""
        self.undoes_steps = False
        """Whether every step is undone."""
        self._first: dict[torch.Tensor, torch.Tensor | None] = {}  # each weight as it was first differentiated
        self.contexts = Control()
        """The contexts around forwards and backward passes."""
        self.perturbation: Perturbation | None = None
        """Moves weights by a roundoff; None moves none."""
        self.lead = Lead(None)
        """Replaces gradients for a step."""
        self.clearing: GradientClearing | None = None
        """Clears gradients before backward passes; None clears none."""
        self._entered: list[AbstractContextManager[None]] = []
        self.state: StateRestorer | None = None
        """Restores values before micro-batches; None restores none."""
        self.values_differed: bool | None = None
        """Whether any replaced value had been different; None: nothing was replaced."""

    def surround_script(self, context: AbstractContextManager[None]) -> None:
        """Enters a context that is never left: it would end if nobody kept it."""
        self._entered.append(context)
        context.__enter__()

    def note_replacement(self, differed: bool) -> None:
        """Notes that a change has replaced a value."""
        self.values_differed = differed or bool(self.values_differed)

    def begin_forward(self, call: ForwardCall) -> None:
        """Looks at the state before the forward, and moves weights before their first use."""
        recording = self._recording
        self._begin_call()
        if self._is_compared:
            unit = recording.roundoff.unit
            self.carried.begin_forward(call.module, trains=call.trains, update=recording.journal.update, unit=unit)
        if not call.trains:
            return
        watch = recording.watch
        if self.perturbation is not None:
            self.perturbation.move([*call.module.parameters(), *watch.all_parameters()])
            # Neither an optimizer nor the script has moved them: the next look must not find it.
            watch.look()

    def restore_state(self, call: ForwardCall) -> AbstractContextManager[None]:
        """Surrounds a forward, before which values are restored."""
        # An evaluation between two micro-batches begins none.
        if self.state is None or not call.is_graded:
            return nullcontext()
        return self.state.around(call.module, self._recording.names.prefix(call.module))

    def run_forward(self, call: ForwardCall) -> AbstractContextManager[None]:
        """Surrounds a forward."""
        return self.contexts.forward(call.module)

    def end_forward(self, _: ForwardCall) -> None:
        """Looks at the state that a forward has left."""
        self._end_call()

    def begin_differentiation(self, _: Differentiation) -> None:
        """Looks at the state before forwards may be recomputed, and keeps weights that will be restored."""
        self._begin_call()
        if self.undoes_steps:
            new = [each for each in self._recording.watch.all_parameters() if each not in self._first]
            self._first |= {each: copy_values(each) for each in new}

    def begin_backward(self, call: BackwardCall) -> None:
        """Clears gradients."""
        if self.clearing is not None:
            self.clearing.clear()

    def describe_loss(self, call: BackwardCall) -> None:
        """Looks at the terms of the loss, and describes it as changes ask for it."""
        call.terms = Terms(call.roots)
        call.origin = self.contexts.describe(call.terms, call.place)

    def run_backward(self, call: BackwardCall) -> AbstractContextManager[None]:
        """Surrounds a backward pass."""
        return self.contexts.backward(call.roots, self._gradients.count, call.terms)

    def find_setter(self, _: BackwardCall) -> AbstractContextManager[None]:
        """Surrounds a backward pass in which a line may write gradients."""
        return nullcontext() if self.clearing is None else self.clearing.find_setter(self._recording.guard.work)

    def run_grad(self, call: GradCall) -> AbstractContextManager[None]:
        """Surrounds a call of `autograd.grad`."""
        return self.contexts.differentiation(call.roots, self._gradients.count)

    def end_differentiation(self, _: Differentiation) -> None:
        """A micro-batch ends."""
        if self.state is not None:
            self.state.end_micro_batch()
        self._end_call()

    def begin_step(self, call: StepCall) -> None:
        """Replaces gradients."""
        self.carried.end_hunt()
        if call.can_lead:
            self.lead.replace_gradients(call.entry)

    def restore_step(self, call: StepCall) -> None:
        """Restores weights and gradients after a step."""
        self.restore_weights()  # before the look after the step: the weights stay at the first ones
        call.was_led = self.lead.restore_gradients()

    def restore_weights(self) -> None:
        """Restores the first weights, if every step is undone."""
        for parameter, values in self._first.items():
            if values is not None:
                parameter.data.copy_(values)

    def end_window(self, call: StepCall) -> None:
        """The next forward begins a window."""
        if self.state is not None:
            self.state.end_window()
        if self._recording.job.is_reference or call.was_led:
            self.carried.end_step(f"{call.entry.index}-{call.entry.steps}")
        self.carried.hunt()

    @property
    def _is_compared(self) -> bool:
        """Whether the run is the one that others follow, or follows it."""
        return self._recording.job.is_reference or self._recording.job.source is not None

    def _begin_call(self) -> None:
        self.carried.end_hunt()
        if self._recording.job.is_reference:
            self.carried.begin_call()

    def _end_call(self) -> None:
        if self._recording.job.is_reference:
            self.carried.end_call()
        self.carried.hunt()

    def summarise(self) -> ControlSummary:
        """Returns what was seen of controls and of state."""
        changed_values = self.state.describe() if self.state is not None else ()
        carried = self.carried.describe()
        cleared, setter = (0, None) if self.clearing is None else (self.clearing.count, self.clearing.setter)
        return ControlSummary(cleared, setter, changed_values, carried, self.values_differed)


# Steps of torch's optimizers, which torch's own hooks announce in two halves.


class StepHooks:
    """Announces steps: once for a wrapper and the optimizer inside it, and once for a closure that is evaluated often.

    Args:
        recording: The objects that listeners share.
        bus: Where steps are announced.
        data: Its loop pauses while a step runs.
        controls: May move weights when an optimizer is made.
    """

    def __init__(self, recording: Recording, bus: Bus, data: DataListener, controls: ControlListener) -> None:
        self._recording, self._bus, self._data, self._controls = recording, bus, data, controls
        self._outer: Any = None  # the optimizer whose step is running
        self._inner: list[Any] = []  # optimizers whose steps are running as a part of that one
        self.parts: set[int] = set()
        """Optimizers that have stepped as a part of another one, which holds their parameters."""

    def note_optimizer(self, optimizer: Any) -> None:
        """Notes a new optimizer, with which the loop begins; where the script has made steps itself none counts."""
        watch = self._recording.watch
        with self._recording.guard.work():
            watch.drop_idle()
            if not watch.has_stand_ins:
                watch.add(optimizer)
                perturbation = self._controls.perturbation
                if perturbation is not None and perturbation.at_optimizer:
                    perturbation.move(watch.all_parameters())
        self._data.loop.start()

    def begin(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Announces a step that begins; returns a closure to use in place of the script's, if that has one."""
        guard = self._recording.guard
        if self._recording.watch.has_stand_ins or guard.off:
            return None
        with self._data.loop.ignore_draws():
            if self._is_inner(optimizer):
                self._inner.append(optimizer)
                self.parts.add(self._recording.watch.add(optimizer))
                return None
            self._outer, place = optimizer, user_place()
            if closure is None:
                self._begin(optimizer, place, can_lead=True)
                return None

        def evaluate_closure() -> Any:
            result = closure()
            if guard.searching is None:
                # The closure has computed the gradients only now.
                self._begin(optimizer, place, can_lead=False)
                guard.searching = optimizer  # later evaluations of a line search are not at the window's weights
            return result

        return evaluate_closure

    def end(self, optimizer: Any) -> None:
        """Announces that a step is over."""
        with self._data.loop.ignore_draws():
            if not self._recording.watch.has_stand_ins:
                self._end(optimizer)
        if not self._recording.guard.off:
            self._data.loop.steps += 1

    def _begin(self, optimizer: Any, place: Place | None, *, can_lead: bool) -> None:
        with self._recording.guard.work():
            self._bus.begin(StepCall(self._entry_of(optimizer), place, can_lead))

    def _end(self, optimizer: Any) -> None:
        guard = self._recording.guard
        if self._inner and self._inner[-1] is optimizer:
            self._inner.pop()
            return
        if self._outer is optimizer:
            self._outer = None
        if guard.searching is optimizer:
            guard.searching = None
        if not guard.off:
            with guard.work():
                self._bus.end(StepCall(self._entry_of(optimizer)))

    def _entry_of(self, optimizer: Any) -> Any:
        watch = self._recording.watch
        return watch.of(watch.add(optimizer))

    def _is_inner(self, optimizer: Any) -> bool:
        """Whether a step is a part of another optimizer's, which holds all its parameters: a wrapper's, or a shard's.

        The wrapper's step is then the script's, with what it does to the gradients before it.
        """
        if self._outer is None or self._outer is optimizer:
            return False
        outer_ids = {id(parameter) for parameter in parameters_of(self._outer)}
        return all(id(parameter) in outer_ids for parameter in parameters_of(optimizer))
