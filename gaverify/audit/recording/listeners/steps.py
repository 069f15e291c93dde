"""Steps of torch's optimizers, which torch's own hooks announce in two halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gaverify.audit.recording.bus import Bus
from gaverify.audit.recording.calls import StepCall
from gaverify.audit.recording.context import Recording
from gaverify.audit.recording.listeners.by_hand import HandListener
from gaverify.audit.recording.listeners.controls import ControlListener
from gaverify.audit.recording.listeners.draws import DataListener
from gaverify.audit.recording.watching import parameters_of
from gaverify.tracebacks import Place, user_place


class StepHooks:
    """Announces steps: once for a wrapper and the optimizer inside it, and once for a closure that is evaluated often.

    Args:
        recording: What listeners share.
        bus: Where steps are announced.
        data: Whose loop pauses while a step runs.
        by_hand: Knows whether the script's optimizers count.
        controls: May move weights when an optimizer is made.
    """

    def __init__(
        self, recording: Recording, bus: Bus, data: DataListener, by_hand: HandListener, controls: ControlListener
    ) -> None:
        self._recording, self._bus, self._data, self._by_hand, self._controls = recording, bus, data, by_hand, controls
        self._outer: Any = None  # the optimizer whose step is running
        self._inner: list[Any] = []  # optimizers whose steps are running as a part of that one
        self.parts: set[int] = set()
        """Optimizers that have stepped as a part of another one, which holds their parameters."""

    def note_optimizer(self, optimizer: Any) -> None:
        """Notes a new optimizer, with which the loop begins; where the script moves its weights itself none counts."""
        if not self._by_hand.is_expected:
            with self._recording.guard.work():
                self._recording.watch.add(optimizer)
                perturbation = self._controls.perturbation
                if perturbation is not None and perturbation.at_optimizer:
                    perturbation.move(self._recording.watch.all_parameters())
        self._data.loop.start()

    def begin(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Announces a step that begins; returns a closure to use in place of the script's, if that has one."""
        guard = self._recording.guard
        if self._by_hand.is_expected or guard.off:
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
            if not self._by_hand.is_expected:
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
