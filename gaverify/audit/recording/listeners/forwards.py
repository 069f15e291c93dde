"""Forwards of models and of their modules: their rows, their random draws, and what the graph tells of their losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from gaverify.audit.recording.calls import BackwardCall, Differentiation, ForwardCall, Recording, UpdateEnd
from gaverify.audit.recording.draws import ForwardDraws
from gaverify.audit.recording.graph import Weight
from gaverify.audit.recording.listeners.other_calls import TargetListener
from gaverify.audit.recording.listeners.updates import UpdateListener
from gaverify.audit.recording.loop import Loop
from gaverify.audit.recording.outputs import Outputs, PinnedModules
from gaverify.audit.recording.samples import Loaders, input_rows, input_shapes
from gaverify.audit.recording.script_calls import PinnedArguments, TracedCalls
from gaverify.audit.recording.values import OutOfSight
from gaverify.records.events import Forward

# Random draws: those of forwards, and those of the script's loop with the samples that it reads.


class DrawListener:
    """Keeps or deals out the random draws of forwards.

    Args:
        recording: The objects that listeners share.
        draws: The run's treatment of these draws.
    """

    def __init__(self, recording: Recording, draws: ForwardDraws) -> None:
        self._recording, self.draws = recording, draws

    def begin_forward(self, call: ForwardCall) -> None:
        """Turns to the draws of a forward."""
        if call.trains:  # others are called alike in both runs, and draw alike
            self.draws.begin((call.model, call.module.training, len(call.shapes)), call.shapes, call.inputs)

    @contextmanager
    def run_forward(self, call: ForwardCall) -> Iterator[None]:
        """Surrounds a forward."""
        if not call.trains:
            yield
            return
        try:
            with self.draws.in_forward(call.module):
                yield
        finally:
            with self._recording.guard.work():
                self.draws.leave_forward()

    def begin_backward(self, _: BackwardCall) -> None:
        """Looks for draws since the forward: in the loss, say."""
        self.draws.enter_backward()

    def run_differentiation(self, _: Differentiation) -> AbstractContextManager[None]:
        """Surrounds what computes gradients: checkpointing draws again there."""
        return self.draws.in_backward()

    def end_update(self, call: UpdateEnd) -> None:
        """Ends an update."""
        self.draws.close(call.number)


class DataListener:
    """Keeps or replays what lies outside the models: draws of the loop, and samples of loaders."""

    def __init__(self) -> None:
        self.loop = Loop()
        """The treatment of draws of the loop."""
        self.loaders = Loaders(self.loop.ignore_draws)
        """The treatment of samples."""

    def replay(self, loop: Loop, loaders: Loaders) -> None:
        """Keeps what lies outside the models, or takes it from the full-batch run.

        Args:
            loop: The treatment of draws of the loop.
            loaders: The treatment of samples.
        """
        self.loop, self.loaders = loop, loaders

    @contextmanager
    def pause(self, call: ForwardCall | Differentiation) -> Iterator[None]:
        """Surrounds a call whose draws are not the loop's."""
        with self.loop.ignore_draws():
            if isinstance(call, ForwardCall) and call.is_graded:  # a script without an optimizer makes none before
                self.loop.start()  # outside the guard, which would take the loop's dispatch mode off again
            yield

    def begin_forward(self, call: ForwardCall) -> None:
        """Notes a forward."""
        if call.is_graded:  # an evaluation reads other data
            self.loop.forward(next((shape[0] for shape in input_shapes(call.args, call.kwargs)), None))

    def end_differentiation(self, _: Differentiation) -> None:
        """A backward pass is over, whatever it was for: forwards are counted since it."""
        self.loop.backwards += 1


# Reads a loss from the graph and the loss functions: its weight, divisor and value, and the targets it counts.


class LossListener:
    """Reads the weight of each loss while it is differentiated.

    Args:
        recording: The objects that listeners share.
        targets: Counts the targets of the losses.
    """

    def __init__(self, recording: Recording, targets: TargetListener) -> None:
        self._job, self._targets = recording.job, targets
        self._weight = Weight()

    def begin(self, call: BackwardCall) -> None:
        """Listens to the gradients of the numbers that the loss was made from."""
        # Repetitions of the full-batch run are read for their gradients alone.
        if self._job.role != "full" or self._job.is_reference:
            self._weight.begin(call.roots)

    def end(self, call: BackwardCall) -> None:
        """Stops listening."""
        call.weight = self._weight.end()

    def describe(self, call: BackwardCall) -> None:
        """Describes the loss of a pass that counts; its targets are those since the last such pass."""
        if not call.is_counted:
            return
        call.targets = self._targets.read()
        self._targets.clear()
        # Targets tell what a mean over them is divided by; a sum of losses may be divided by anything.
        call.divisor = self._weight.divisor if self._weight.of_a_sum or not call.targets else None
        call.scales, call.loss = self._weight.scales, self._weight.value_of(call.roots)


# Calls of inner modules in the last update: recorded for each row, or replaced by the full batch's.


class ModuleListener:
    """Hands forwards and losses of the last update to what controls ask for.

    Args:
        recording: The objects that listeners share.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.outputs: Outputs | None = None
        """Records what module calls return and are given back; None: nothing is recorded."""
        self.pinned_modules: PinnedModules | None = None
        """Replaces what they return; None: nothing is replaced."""
        self.traced_calls: TracedCalls | None = None
        """Notes the calls of the script's own code; None: nothing is noted."""
        self.pinned_arguments: PinnedArguments | None = None
        """Replaces arguments of these; None: nothing is replaced."""

    def pin(self, call: ForwardCall) -> AbstractContextManager[None]:
        """Surrounds a forward in which calls are replaced."""
        if self.pinned_modules is None or not self._concerns(call):
            return nullcontext()
        return self.pinned_modules.listening(call.module, call.args, call.kwargs)

    def record(self, call: ForwardCall) -> AbstractContextManager[None]:
        """Surrounds a forward in which calls are recorded, with the replaced values where there are some."""
        if self.outputs is None or not self._concerns(call):
            return nullcontext()
        return self.outputs.listening(call.module, call.args, call.kwargs)

    def trace_loss(self, call: BackwardCall) -> None:
        """Looks at the graph behind a loss, while there is one."""
        if not self._recording.is_last_update:
            return
        # After the pass the graph is gone, and with it the lines that it keeps.
        if self.outputs is not None:
            call.origin = replace(
                call.origin,
                met=(*self.outputs.meetings(call.roots), *filter(None, [call.terms.loss_line])),
                inside=tuple(self.outputs.inside(call.roots)),
                custom=tuple(self.outputs.custom_functions(call.roots)),
            )
        if self.pinned_modules is not None:
            self.pinned_modules.note_differentiation(call.roots)

    def end_update(self, call: UpdateEnd) -> None:
        """Stores what was recorded."""
        recording, watch = self._recording, self._recording.watch
        if call.number != recording.job.updates:  # earlier updates only lead to the one that differs
            return
        if self.outputs is not None:
            recording.storage.tensors("outputs", self.outputs.forwards)
        if self.pinned_modules is not None:
            pinned_calls = self.pinned_modules.describe([watch.parameters(at) for at in range(len(watch))])
            # The full-batch run stores what others are given; those store what that changed, and cannot show.
            stored = self.pinned_modules.forwards if recording.job.source is None else pinned_calls
            recording.storage.tensors("pinned", stored)
        if self.traced_calls is not None:
            recording.storage.tensors("trace", self.traced_calls.trace)
        if self.pinned_arguments is not None and recording.job.source is None:
            recording.storage.tensors("arguments", self.pinned_arguments.kept)

    def _concerns(self, call: ForwardCall) -> bool:
        return call.trains and self._recording.is_last_update


# Forwards of models: their rows, the forwards that backward passes reach later, and what they draw.


class ForwardListener:
    """Numbers and records the forwards of outermost modules with something to train.

    Args:
        recording: The objects that listeners share.
        updates: Where the rows of forwards are kept.
    """

    def __init__(self, recording: Recording, updates: UpdateListener) -> None:
        self._recording, self._updates = recording, updates
        self._count = 0

    def identify(self, call: ForwardCall) -> None:
        """Finds out whether the module trains."""
        try:
            call.trains = call.is_graded and self._recording.names.add(call.module)
        except OutOfSight:  # a lazy module, or one on the meta device: the report says that it was left out
            self._recording.guard.leave_out("modules without values")

    def note_arithmetic(self, call: ForwardCall) -> None:
        """Looks at the precision of the module's parameters, and at autocast."""
        if call.trains:
            self._recording.roundoff.add(call.module)

    def record(self, call: ForwardCall) -> None:
        """Writes the forward, and keeps the fingerprints of its rows."""
        if not call.trains:
            return
        self._count += 1
        call.number, call.model = self._count, self._recording.names.index(call.module)
        call.shapes = input_shapes(call.args, call.kwargs)
        rows = next((shape[0] for shape in call.shapes), None)  # of the first tensor: masks may come behind it
        journal = self._recording.journal
        journal.add(Forward(*journal.stamp(), rows=rows, model=call.model, number=call.number))
        # An audit of calls alone compares no data.
        call.inputs = input_rows(call.args, call.kwargs) if self._recording.job.role != "events" else {}
        self._updates.add_rows(call.number, call.inputs)

    @contextmanager
    def run(self, call: ForwardCall) -> Iterator[None]:
        """Surrounds the forward; what it changes in weights and gradients, it changes although it raises."""
        recording = self._recording
        recording.phase.in_forward = True
        try:
            yield
        finally:
            recording.phase.in_forward = False
            if call.trains:
                with recording.guard.work():
                    recording.unannounced.note(recording.watch.look(), "forward")

    def note_result(self, call: ForwardCall) -> None:
        """Looks whether the forward returned a loss."""

    def is_inside(self) -> bool:
        """Whether a forward is running, or recomputed; inner modules tell whether autocast is on."""
        phase, roundoff = self._recording.phase, self._recording.roundoff
        if phase.in_forward and roundoff.open:
            roundoff.look_at_autocast()
        return phase.in_forward or phase.in_backward
