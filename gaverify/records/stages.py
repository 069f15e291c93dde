"""The three places at which an update is compared, and what stood between them: clipping, settings, a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from gaverify.records.comparison import Outcome
from gaverify.records.numbers import Number


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
    relative_difference: Number
    norm_ratio: Number


@dataclass(frozen=True)
class Clip:
    """One clipping after the window's last backward pass.

    `active`: whether it changed a gradient; `norm` is what it measured and `limit` what it lets through, NaN unknown.
    """

    call: str
    active: bool
    norm: Number = math.nan
    limit: Number = math.nan


@dataclass(frozen=True)
class SettingDifference:
    """A number of an optimizer, in this rank, that differs between the runs when the same update is made."""

    optimizer: int
    group: int
    name: str
    full: float
    accumulated: float
    rank: int = 0
