"""Windows: which calls belong to which update, which updates belong together, and what one window showed.

Pure functions over frozen events; no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

from gaverify.records.events import (
    Backward,
    Event,
    Forward,
    GradientsRemoved,
    OptimizerEvent,
    ScalerCall,
    Step,
    ZeroGrad,
)
from gaverify.records.experiment import ControlRun, Count, Operation, WeightFit, are_shares
from gaverify.records.json_objects import JsonRecord
from gaverify.records.numbers import Number
from gaverify.thresholds import COMPUTED_FLOAT32, NO_WEIGHT

# The accumulation window of one update: `run` and `audit` fill the same record, and each rule judges it once.
#
# Shapes: K micro-batches.


SCRIPT = "the script's own"
"""The weighting of a training loop."""
EXPLICIT = "explicit"
"""The weighting of a recipe in numbers, or in a function of the user's."""


@dataclass(frozen=True)
class AccumulationWindow(JsonRecord):
    """The micro-batches of one update, how they are weighted, and the weights that would be right."""

    unwritten = ("remedy", "place", "counts")

    used: tuple[Number, ...] = ()
    """Weight of each micro-batch in the accumulated gradient; in an audit fitted, and empty without a fit."""
    weighting: str = SCRIPT
    """The recipe of these weights: "uniform", "samples", …"""
    sizes: tuple[int, ...] = ()
    """Samples of each micro-batch; in an audit of each forward pass, 0 where unknown."""
    steps: int = 0
    """K, the number of micro-batches; in an audit the backward passes of the accumulated run."""
    losses: tuple[Number, ...] = ()
    """Loss of each micro-batch before its weight in `used`; in an audit as the script scaled it, NaN where unknown."""
    full_loss: Number = math.nan
    """Value whose gradient is the full batch's; NaN where its gradient is no weighted sum of its passes."""
    # Whole numbers in an audit, whose document shows them as such; a run may count parts of targets.
    valid_targets: tuple[int | Number, ...] = ()
    """Targets of each micro-batch that the loss counts, or their class weights; empty where one is unknown."""
    ignored_targets: bool = False
    """Whether some targets count for nothing."""
    has_class_weights: bool = False
    """Whether `valid_targets` are sums of class weights."""
    fit: WeightFit | None = None
    """The weights that would be right; in an audit at the stage that decided the update; None without a fit."""
    remedy: ControlRun | None = None
    """The run with them, or with the window's counts; in an audit `ControlResults.weighted_run` holds it."""
    failure: str = ""
    """Why that run was impossible; the weights stay suspected then."""
    place: Operation | None = None
    """The loss call or division whose result the fitted weights add up."""
    counts: tuple[Count, ...] = ()
    """Divisors of each micro-batch, where dividing by the window's count is the remedy."""
    divisors: tuple[Number, ...] = ()
    """Divisor of each loss up to a common factor, where no targets were seen; empty where one is unknown."""
    scales: tuple[tuple[Number, ...], ...] = ()
    """For each backward pass, the factors of each number that its loss was made from, outermost first."""

    @property
    def has_recipe(self) -> bool:
        """Whether a recipe gives the weights and gaverify took the losses; a script's have to be found out."""
        return self.weighting != SCRIPT

    @property
    def has_wrong_weights(self) -> bool:
        """Whether the fitted weights are what is wrong: they were tried, or only the trial was impossible."""
        return self.remedy is not None or bool(self.failure)

    @property
    def given_wrong(self) -> bool:
        """Whether weights were given as numbers where the shares of the samples are right: nothing in a model is so."""
        return self.weighting == EXPLICIT and self.fit is not None and are_shares(self.fit.weights, self.sizes)

    @property
    def shares(self) -> tuple[tuple[float, ...], ...]:
        """The shares of the samples, and of the targets where each micro-batch's were seen."""
        amounts = [each for each in (self.sizes, self.valid_targets) if len(each) == self.steps and sum(each) > 0]
        return tuple(tuple(amount / sum(each) for amount in each) for each in amounts)

    def name_shares(
        self,
        weights: Sequence[float],
        rel_tol: float = COMPUTED_FLOAT32,
        abs_tol: float = NO_WEIGHT,
        divisors: Sequence[float] = (),
    ) -> str:
        """Returns the name of the amounts that weights are the shares of; "" where they are of none that was seen.

        Args:
            weights: One for each micro-batch.
            rel_tol: How far a weight may be from its share, relative.
            abs_tol: How far a weight of about zero may be from zero.
            divisors: Divisor of each loss, where that is known beside the samples and the targets.
        """
        # Samples come first: where every sample has as many targets, the shares of both are the same.
        amounts = (("samples", self.sizes), ("targets", self.valid_targets), ("counted", divisors))
        return next((name for name, each in amounts if are_shares(weights, each, rel_tol, abs_tol)), "")

    def refit(self, fit: WeightFit | None) -> AccumulationWindow:
        """Returns the same micro-batches with another fit; it finds the weights that a script used as well."""
        return replace(self, fit=fit, used=fit.used if fit is not None else ())


# From events to windows: which calls belong to which update, and which updates of two runs belong together.


E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Window:
    """The events of one update."""

    number: int
    """Number of the update, counted from 1."""
    events: tuple[Event, ...]
    """Its events in order."""
    zero_grads: int = 0
    """Number of `zero_grad` calls, before its first backward pass or after its step."""

    def of(self, kind: type[E]) -> tuple[E, ...]:
        """The events of one kind, in order."""
        return tuple(event for event in self.events if isinstance(event, kind))

    @property
    def backwards(self) -> int:
        """Backward passes since the last update, or since a step that a `GradScaler` skipped."""
        count = 0
        for event in self.events:
            count += isinstance(event, Backward)
            # A scaler that found infinities leaves the step out: the passes before it are no part of the next update.
            if isinstance(event, ScalerCall) and event.skipped:
                count = 0
        return count

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that make up the update."""
        return self.of(Step)

    @property
    def optimizers(self) -> tuple[int, ...]:
        """The optimizers that stepped."""
        return tuple(step.optimizer for step in self.steps)

    @property
    def complete(self) -> bool:
        """Whether there was a step: the last window of a run may have none."""
        return bool(self.steps)

    @property
    def rows(self) -> int:
        """Rows of all its forwards."""
        return sum(forward.rows or 0 for forward in self.of(Forward))

    def reached_forwards(self) -> tuple[Forward, ...]:
        """The forwards that its backward passes reach."""
        numbers = {number for backward in self.of(Backward) for number in backward.forwards or ()}
        return tuple(forward for forward in self.of(Forward) if forward.number in numbers)

    @property
    def reached_rows(self) -> int | None:
        """Rows of the forwards that a backward pass reached; None where that was not seen."""
        if any(backward.forwards is None for backward in self.of(Backward)):
            return None
        return sum(forward.rows or 0 for forward in self.reached_forwards())

    @property
    def dropped_positions(self) -> tuple[int, ...]:
        """The positions of forwards that no backward pass reached, where others were reached."""
        reached = self.reached_forwards()
        # If no forward was reached, the passes were not followed, and nothing is known of single forwards.
        return tuple(at for at, event in enumerate(self.of(Forward)) if event not in reached) if reached else ()

    @property
    def before_last_backward(self) -> tuple[Event, ...]:
        """The events between the first and the last backward pass: inside the window in the strict sense."""
        places = [at for at, event in enumerate(self.events) if isinstance(event, Backward)]
        return self.events[places[0] : places[-1]] if len(places) > 1 else ()


def windows_of(events: Sequence[Event], numbers: Mapping[StepKey, int] | None = None) -> tuple[Window, ...]:
    """Returns the windows in order; the last one has no step where the script ended or was stopped inside it.

    Where optimizers step at different times, each has windows of its own: of the events since its last step those that
    concern its parameters.

    Args:
        events: Of the whole run.
        numbers: The numbers of windows by their steps; without it steps of one update share a window.
    """
    groups: dict[int, list[Event]] = {}
    for event in events:
        groups.setdefault(event.update, []).append(event)
    members: dict[int, dict[StepKey, Step]] = {}
    for key, step in keys_of(events):
        # A step that the other run lacks has no number: its window stands behind all that are compared.
        number = step.update if numbers is None else numbers.get(key, len(numbers) + step.update)
        members.setdefault(number, {})[key] = step
    together = {frozenset(optimizer for optimizer, _ in keys) for keys in members.values()}
    if len(together) < 2 and all(len({step.update for step in steps.values()}) == 1 for steps in members.values()):
        # Optimizers that always step together have their windows in common.
        cleared = _zero_grads(events)
        windows = [Window(number, tuple(group), cleared.get(number, 0)) for number, group in sorted(groups.items())]
        # Forwards behind the last step, such as an evaluation, make no window of their own.
        return tuple(window for window in windows if window.complete or window.of(Backward))
    step_windows = [_own_window(events, number, steps) for number, steps in sorted(members.items())]
    last = max(event.update for event in events) if events else 0
    trailing_window = Window(max(members, default=0) + 1, tuple(groups.get(last, ())))
    return (
        (*step_windows, trailing_window)
        if not trailing_window.complete and trailing_window.of(Backward)
        else tuple(step_windows)
    )


def _own_window(events: Sequence[Event], number: int, steps: Mapping[StepKey, Step]) -> Window:
    """The window of some steps among those of other optimizers."""
    optimizers = {optimizer for optimizer, _ in steps}
    # Steps of one update may be apart: the window reaches from the earliest beginning to the last step.
    begins = min(_begin(events, key) for key in steps)
    last = max(at for at, event in enumerate(events) if any(event is step for step in steps.values()))
    # Calls between a step and the next forward, such as `zero_grad`, still belong to the update of that step.
    ends = next((at for at in range(last, len(events)) if isinstance(events[at], Forward | Backward)), len(events))
    foreign = _foreign(events, optimizers)
    stretch = [event for at, event in enumerate(events[begins:ends], begins) if at not in foreign]
    final = next(iter(steps.values())).update
    passes = [event for event in stretch if isinstance(event, Backward) and _concerns(event, optimizers, final)]
    reached = {forward for backward in passes for forward in backward.forwards or ()}
    window_events = []
    for event in stretch:
        if isinstance(event, Step):
            concerned = any(event is step for step in steps.values())
        elif isinstance(event, Forward):
            concerned = event.number in reached
        else:
            concerned = _concerns(event, optimizers, final)
        if concerned:
            window_events.append(event)
    clearing = [
        at
        for at, event in enumerate(events)
        if isinstance(event, ZeroGrad) and not optimizers.isdisjoint(event.optimizers)
    ]
    return Window(number, tuple(window_events), sum(begins <= at < ends for at in clearing))


def _concerns(event: Event, optimizers: set[int], update: int) -> bool:
    """Whether an event is one of some optimizers'; one that names none belongs to the update that it was made in."""
    named = event.optimizers if isinstance(event, OptimizerEvent) else ()
    return not optimizers.isdisjoint(named) if named else event.update == update


def _begin(events: Sequence[Event], key: StepKey) -> int:
    """Where the window of a step begins: at the first forward or backward after the step before it."""
    steps = [at for at, event in enumerate(events) if isinstance(event, Step) and event.optimizer == key[0]]
    if key[1] == 1:
        return 0  # calls before the first forward (`zero_grad`) belong to the first window
    before = steps[key[1] - 2]
    return next((at for at in range(before, len(events)) if isinstance(events[at], Forward | Backward)), len(events))


def _foreign(events: Sequence[Event], optimizers: set[int]) -> set[int]:
    """The places of backward passes that are other optimizers' business: used by their steps, cleared for these."""
    pending: dict[int, list[int]] = {}
    cleared: set[int] = set()
    used: set[int] = set()
    used_here: set[int] = set()
    for at, event in enumerate(events):
        if isinstance(event, Backward):
            for optimizer in event.optimizers:
                pending.setdefault(optimizer, []).append(at)
        elif isinstance(event, GradientsRemoved):
            for optimizer in event.optimizers:
                cleared_passes = pending.pop(optimizer, [])
                cleared |= set(cleared_passes) if optimizer in optimizers else set()
        elif isinstance(event, Step):
            taken = set(pending.pop(event.optimizer, []))
            used |= taken
            used_here |= taken if event.optimizer in optimizers else set()
    # In a GAN, the generator's loss reaches the discriminator, which clears these gradients and never uses them.
    return (cleared & used) - used_here


def _zero_grads(events: Sequence[Event]) -> dict[int, int]:
    """Counts `zero_grad` per window, whether the script calls it before the window or after its step."""
    first = next((at for at, event in enumerate(events) if isinstance(event, Backward)), len(events))
    # A script that clears before its first backward pass clears for the window that follows, others for the last.
    leading = any(isinstance(event, ZeroGrad) for event in events[:first])
    counts: dict[int, int] = {}
    stepped = False
    for event in events:
        if isinstance(event, Forward | Backward):
            stepped = False
        elif isinstance(event, Step):
            stepped = True
        elif isinstance(event, ZeroGrad):
            number = event.update + 1 if leading and stepped else event.update
            counts[number] = counts.get(number, 0) + 1
    return counts


StepKey = tuple[int, int]
"""An optimizer, in the order in which they were made, and the number of its step from 1."""

Round = tuple[StepKey, ...]
"""Steps that are compared together: those of one update, one for each optimizer that stepped in it."""


def keys_of(events: Sequence[Event]) -> list[tuple[StepKey, Step]]:
    """Returns every step with its key, in order."""
    counts: dict[int, int] = {}
    keyed_steps = []
    for event in events:
        if isinstance(event, Step):
            counts[event.optimizer] = counts.get(event.optimizer, 0) + 1
            keyed_steps.append(((event.optimizer, counts[event.optimizer]), event))
    return keyed_steps


def rounds_of(events: Sequence[Event]) -> tuple[Round, ...]:
    """Returns the steps of each update: those without a forward or backward pass between them."""
    groups: dict[int, list[StepKey]] = {}
    for key, event in keys_of(events):
        groups.setdefault(event.update, []).append(key)
    return tuple(tuple(sorted(keys)) for _, keys in sorted(groups.items()))


def common_rounds(full: Sequence[Event], accumulated: Sequence[Event]) -> tuple[Round, ...]:
    """Returns the rounds that both runs have, in the full-batch run's order.

    Where the runs group their steps otherwise (one steps both networks at the end of a window, the other steps the
    first before it differentiates the second), or where optimizers that step together share no backward pass (networks
    that take turns), every step is a round of its own.
    """
    full_rounds, part = rounds_of(full), rounds_of(accumulated)
    common = min(len(full_rounds), len(part))
    # A run that was stopped early has fewer rounds; the rest has no counterpart.
    alike = all(_alike(a, b) for a, b in zip(full_rounds[:common], part[:common], strict=True))
    if alike and not (_have_own_passes(full) or _have_own_passes(accumulated)):
        return full_rounds[:common]
    accumulated_keys = {key for key, _ in keys_of(accumulated)}
    return tuple((key,) for key, _ in keys_of(full) if key in accumulated_keys)


def _have_own_passes(events: Sequence[Event]) -> bool:
    """Whether two optimizers that step in one update have no backward pass in common."""
    touched: dict[int, list[set[int]]] = {}
    stepped: dict[int, set[int]] = {}
    for event in events:
        if isinstance(event, Backward):
            touched.setdefault(event.update, []).append({*event.optimizers})
        elif isinstance(event, Step):
            stepped.setdefault(event.update, set()).add(event.optimizer)
    for update, optimizers in stepped.items():
        passes = touched.get(update, [])
        of_each = [{at for at, each in enumerate(passes) if optimizer in each} for optimizer in sorted(optimizers)]
        if any(a and b and not a & b for a, b in combinations(of_each, 2)):
            return True
    return False


def number_steps(rounds: Sequence[Round]) -> Mapping[StepKey, int]:
    """Returns the number of the round that each step is in, from 1."""
    return {key: at for at, round_ in enumerate(rounds, 1) for key in round_}


def _alike(a: Round, b: Round) -> bool:
    """Whether two updates belong together, although an optimizer may step in one of them only."""
    return a == b or (bool(set(a) & set(b)) and (set(a) <= set(b) or set(b) <= set(a)))
