"""Random draws: those of forwards, and those of the script's loop with the samples that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from gaverify.audit.recording.calls import BackwardCall, Differentiation, ForwardCall, UpdateEnd
from gaverify.audit.recording.context import Recording
from gaverify.audit.recording.draws import Draws
from gaverify.audit.recording.loop import Loop
from gaverify.audit.recording.rows import input_shapes
from gaverify.audit.recording.samples import Inputs, Loaders


class DrawListener:
    """Keeps or deals out the random draws of forwards.

    Args:
        recording: What listeners share.
        draws: What the run does about them.
    """

    def __init__(self, recording: Recording, draws: Draws) -> None:
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
    """Keeps or replays what lies outside the models: draws of the loop, samples of loaders, inputs of forwards."""

    def __init__(self) -> None:
        self.loop = Loop()
        """What is done about draws of the loop."""
        self.loaders = Loaders(self.loop.ignore_draws)
        """What is done about samples."""
        self.starts_at_forward = False
        """Whether the loop begins with the first forward: no optimizer is made."""
        self._inputs: Inputs | None = None

    def replay(self, loop: Loop, loaders: Loaders, inputs: Inputs | None) -> None:
        """Keeps what lies outside the models, or takes it from the full-batch run.

        Args:
            loop: What is done about draws of the loop.
            loaders: What is done about samples.
            inputs: What is done about the inputs of forwards; None: nothing.
        """
        self.loop, self.loaders, self._inputs = loop, loaders, inputs

    @contextmanager
    def pause(self, call: ForwardCall | Differentiation) -> Iterator[None]:
        """Surrounds a call whose draws are not the loop's."""
        with self.loop.ignore_draws():
            if self.starts_at_forward and isinstance(call, ForwardCall):
                self.loop.start()  # outside the guard, which would take the loop's dispatch mode off again
            yield

    def begin_forward(self, call: ForwardCall) -> None:
        """Notes a forward; its inputs are replaced where that is asked for."""
        if call.is_graded:  # an evaluation reads other data
            self.loop.forward(next((shape[0] for shape in input_shapes(call.args, call.kwargs)), None))
            if self._inputs is not None:
                self._inputs.forward(call.module, call.args, call.kwargs)

    def end_differentiation(self, _: Differentiation) -> None:
        """A backward pass is over, whatever it was for: forwards are counted since it."""
        self.loop.backwards += 1
        if self._inputs is not None:
            self._inputs.after_backward()
