"""The three places at which an update is compared, and what stood between them: clipping, settings, a step, a partner.

Networks train against one another: whose gradients a step uses, and which partner its loss met, is told by pure
functions over frozen events and fits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from gaverify.records.comparison import Outcome
from gaverify.records.events import Event
from gaverify.records.experiment import WeightFit
from gaverify.records.windows import Window
from gaverify.thresholds import FIT_FLOAT32, LOST_SHARE


class Stage(str, Enum):
    """Where an update is looked at; the values are what JSON prints."""

    SUMMED = "summed"
    """The gradient as the window's last backward pass left it, before clipping or the script's own hand changed it."""

    USED = "used"
    """The gradient that the optimizer saw."""

    UNCLIPPED = "unclipped"
    """The same in a control whose losses are so small that nothing is clipped."""

    CHANGE = "change"
    """The change of the weights by steps that both started from the same weights, with the same gradient or without."""


@dataclass(frozen=True)
class StageComparison:
    """How far both runs are apart at one stage, relative to the full batch, and the ratio of the norms."""

    stage: Stage
    outcome: Outcome
    relative_difference: float
    norm_ratio: float


@dataclass(frozen=True)
class Clip:
    """One clipping after the window's last backward pass.

    `active`: whether it changed a gradient; `norm` is what it measured and `limit` what it lets through, NaN unknown.
    """

    call: str
    active: bool
    norm: float = math.nan
    limit: float = math.nan


AVERAGE = "decay of the average"
"""Stands among the settings for how much of its old value a moving average of the weights keeps."""


@dataclass(frozen=True)
class SettingDifference:
    """A number of an optimizer, in this rank, that differs between the runs when the same update is made."""

    optimizer: int
    group: int
    name: str
    full: float
    accumulated: float
    rank: int = 0


@dataclass(frozen=True)
class Foreign:
    """Backward passes of a window, from 0, that do not belong to an optimizer's gradient; what is left without them."""

    optimizer: int
    passes: tuple[int, ...]
    residual: float


@dataclass(frozen=True)
class Partner:
    """Another optimizer, and how many steps it had made when an update's loss was computed, in each run."""

    optimizer: int
    full: int
    accumulated: int


def foreign_passes(
    window: Window | None, optimizer: int, fit: WeightFit | None, others: Collection[int]
) -> Foreign | None:
    """Returns the backward passes that an optimizer's step uses although they are others' alone; None where none is.

    They reach other optimizers' own parameters as well, and the full-batch gradient is the sum of the remaining ones.

    Args:
        window: Of the step.
        optimizer: The optimizer.
        fit: Of its gradient alone.
        others: The optimizers that hold parameters which this one does not. One that holds the same ones (that a
            wrapper lets step, or that is never used) has no loss of its own.
    """
    passes = window.of("backward") if window is not None else ()
    if fit is None or len(fit.weights) != len(passes) or not passes or not fit.residual < FIT_FLOAT32:
        return None
    most, used = max(map(abs, fit.weights)), max(map(abs, fit.used))
    found = tuple(
        at
        for at, event in enumerate(passes)
        if abs(fit.weights[at]) < LOST_SHARE * most
        and abs(fit.used[at]) > LOST_SHARE * used
        and optimizer in event.touched
        and not set(others).isdisjoint(event.touched)
    )
    return Foreign(optimizer, found, fit.residual) if found else None


def partners_of(
    full: Sequence[Event],
    accumulated: Sequence[Event],
    windows: tuple[Window | None, Window | None],
    models: Mapping[int, frozenset[int]],
) -> tuple[Partner, ...]:
    """Returns the optimizers that had made another number of steps when a window's loss ran through their models.

    A step that one run makes before that loss, the other run has to make after it: one that it never makes is missing,
    which is another fault than its order.

    Args:
        full: The events of the full-batch run.
        accumulated: Those of the accumulated run.
        windows: The window in each run.
        models: The numbers of the models that each optimizer trains.
    """
    whole, part = windows
    if whole is None or part is None:
        return ()
    forwards = whole.reached(), part.reached()
    if not all(forwards):
        return ()
    found = []
    for optimizer, trained in models.items():
        through = [next((event for event in run if event.values["model"] in trained), None) for run in forwards]
        if optimizer in part.optimizers or through[0] is None or through[1] is None:
            continue
        met = _steps_before(full, optimizer, through[0]), _steps_before(accumulated, optimizer, through[1])
        made = _steps(full, optimizer), _steps(accumulated, optimizer)
        if met[0] != met[1] and min(made) >= max(met):
            found.append(Partner(optimizer, *met))
    return tuple(found)


def _steps(events: Sequence[Event], optimizer: int) -> int:
    return sum(event.kind == "step" and event.values["optimizer"] == optimizer for event in events)


def _steps_before(events: Sequence[Event], optimizer: int, forward: Event) -> int:
    at = next((at for at, event in enumerate(events) if event is forward), len(events))
    return _steps(events[:at], optimizer)
