"""Control runs and what they say about a suspect."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from gaverify.records.operations import Suspect
from gaverify.records.weights import WeightFit


class ControlKind(Enum):
    """What a control run neutralised, or what it put in place of something."""

    HELD = "a result held constant"
    FROZEN = "modules in eval mode, on stored statistics"
    CACHED_GRADIENTS = "the loss computed once over all outputs, the model backward per micro-batch"
    OWN_CACHE = "the full batch handed to a loss that caches gradients itself"
    DECISIONS = "the full batch's decisions taken by every micro-batch"
    STATE_RESTORED = "the state restored before each micro-batch"
    STATE_PRIMED = "one forward of the full batch before both runs, whose changes stay"
    STATE_PRIMED_AND_HELD = "one forward of the full batch before both runs, writes to state without effect after it"
    STATE_HELD = "writes to state without effect"
    DRAWS_HELD = "every random draw held constant"
    WEIGHTS = "other micro-batch weights"
    COUNTS = "the window's counts in the place of each micro-batch's own"
    FULL_BATCH = "what code gives and gives back, taken from the full batch"
    HOOKS = "hooks left out"
    GRADIENTS_KEPT = "gradients that a forward clears put back"
    REPLACED = "another layer in the place of one"
    HELD_IN_WINDOW = "a value of the full batch held constant in every micro-batch, the full batch as it is"
    OTHERS = "everything but one cause neutralised"


@dataclass(frozen=True)
class ControlRun:
    """Both strategies run again with a suspect neutralised, or with a remedy applied.

    `what` says it in words for reports, `kind` for rules.
    `left` is the difference that stays, relative to the full-batch gradient's norm; `fit` the weights that would be
    right in this run, where they were asked for. `reached` names the parameters whose gradient was not zero in it:
    what is held as a constant cuts others off, and hides what diverges before it. `holds`: as a repair it gave the full
    batch's gradient on a second batch as well, as far as one could be made. `modules` are those that
    it neutralised: what it proves, it proves of all of them together.
    """

    what: str
    left: float
    rounding: bool
    fit: WeightFit | None = None
    kind: ControlKind = ControlKind.HELD
    reached: frozenset[str] = frozenset()
    holds: bool = True
    modules: tuple[str, ...] = ()

    @property
    def repairs(self) -> bool:
        """Whether it leaves nothing on this batch and on a second one."""
        return self.rounding and self.holds


@dataclass(frozen=True)
class Cause:
    """A suspect, the control run that neutralised it, and the remedies that were run.

    `explained`: the share of the divergence that went away with it; `alone`: the difference that it makes by itself,
    with every other cause neutralised; `failure`: why no control run was possible, where there is none.
    """

    suspect: Suspect
    control: ControlRun | None
    remedies: tuple[ControlRun, ...] = ()
    explained: float = math.nan
    alone: float = math.nan
    failure: str = ""
