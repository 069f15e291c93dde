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
    """How far both runs are apart at one stage."""

    stage: Stage
    """The stage."""
    outcome: Outcome
    """Outcome of all parameters there."""
    relative_difference: Number
    """‖accumulated − full‖ / ‖full‖ over all parameters together."""
    norm_ratio: Number
    """‖accumulated‖ / ‖full‖; NaN where the latter is zero."""


@dataclass(frozen=True)
class Clip:
    """One clipping after the window's last backward pass."""

    call: str
    """Name of the function that clips."""
    active: bool
    """Whether it changed a gradient."""
    norm: Number = math.nan
    """Norm that it measured; NaN where not known."""
    limit: Number = math.nan
    """Largest norm, or value, that it lets through; NaN where not known."""


@dataclass(frozen=True)
class SettingDifference:
    """A number of an optimizer that differs between the runs when the same update is made."""

    optimizer: int
    """Number of the optimizer, from 0 in the order in which they were made."""
    group: int
    """Number of its parameter group, from 0."""
    name: str
    """Name of the setting, such as "lr" or "steps counted"."""
    full: float
    """Value in the full-batch run."""
    accumulated: float
    """Value in the accumulated run."""
    rank: int = 0
    """Rank of the process that has it."""
