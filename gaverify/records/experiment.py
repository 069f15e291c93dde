"""What a search names and tries: operations and suspects, weights that explain a gradient, control runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from gaverify.records.findings import Location
from gaverify.thresholds import COMPUTED_FLOAT32, FIT_MAGNIFIES, NO_WEIGHT, SAME_NUMBER

FunctionKey = tuple[str, tuple[str, int] | None, int]
"""A call of a torch function: its name, the line of the user's code, the how-manieth of this name on this line."""
SuspectKind = Literal["rows", "matrix", "non-additive", "control-flow", "random"]


@dataclass(frozen=True)
class Operation:
    """One operation: its name at the dispatcher, the module path around it, and its line.

    `caller` is said beside a line of a library: the class of the outermost module or loss around the operation that is
    none of the model's, and the nearest line of the user's own code.
    """

    name: str
    module: str | None = None
    kind: str = ""
    library: bool = False
    file: str | None = None
    line: int | None = None
    source: str = ""
    caller: str = ""

    @property
    def location(self) -> Location:
        """Module path and class, file and line."""
        return Location(self.module, self.kind or None, self.file, self.line)

    @property
    def place(self) -> tuple[str, str, str | None, int | None]:
        """What tells one operation from another: its name, its module and its line."""
        return self.name, self.module or "", self.file, self.line if self.file is not None else None

    def __str__(self) -> str:
        where = f"`{self.name}`"
        if self.file is not None:
            where += f" at {self.file}:{self.line}"
        return where + (f" in `{self.module}`" if self.module else "")


@dataclass(frozen=True)
class ModuleDifference:
    """How far a module's outputs for the same samples are apart between the full batch and the micro-batches.

    `difference` is relative to the largest value of an output; 0 where they agree to rounding.
    """

    module: str
    difference: float


@dataclass(frozen=True)
class Suspect:
    """The first operation whose result for the same samples depends on the batch that they came in."""

    kind: SuspectKind
    """What depends on the batch: rows, a cross-sample matrix, a non-additive loss, control flow or random draws."""
    operation: Operation
    """First operation whose result depends on the batch; a module or loss where only that is known."""
    source: Operation | None
    """Reduction over the batch that the operation reads; None where there is none."""
    difference: float
    """Relative difference of rows, losses or gradients; 1 where rows could not be matched."""
    samples: int
    """Number of samples whose results differ; B where rows could not be matched, 0 where not counted."""
    in_model: bool
    """Whether outputs of a module of the model differ by this operation, sample by sample."""
    statistics: bool
    """Whether the module around the operation scales channels by batch statistics."""
    functions: tuple[FunctionKey, ...] = ()
    """Torch calls whose results a control run keeps constant."""
    source_functions: tuple[FunctionKey, ...] = ()
    """Torch calls of the reductions over the batch, for the same control."""
    again: tuple[FunctionKey, ...] = ()
    """Differing torch calls on this line and on equal lines in modules of the same class, without `functions`."""
    exits: tuple[FunctionKey, ...] = ()
    """Next calls downstream whose samples differ, for the same control."""
    frame: tuple[str, int] | None = None
    """File and line where the code decides; None unless `kind` is "control-flow"."""
    calls: tuple[int, ...] = ()
    """Indices of the module calls at which a cached gradient cannot cut the graph."""
    outputs: tuple[int, ...] = ()
    """Positions of those module outputs that differ; empty if all of them do."""
    order: int | None = None
    """Sample order in a dimension with several rows per sample: 0 outermost, 1 innermost; None where not known."""
    model_mixes: bool = False
    """Whether a module of the model returns batch-dependent rows that it does not compute from this operation."""
    differentiable: bool = True
    """Whether the operation's result has a gradient."""

    @property
    def culprit(self) -> Operation:
        """Where samples meet first: the reduction, or the operation itself."""
        return self.source or self.operation


@dataclass(frozen=True)
class WeightFit:
    """Least squares over the gradients of the K micro-batches; residuals are relative.

        g_full ≈ Σ weights_k g_k        g_used ≈ Σ used_k g_k        g_used ≈ factor · g_full

    `weights` are those that would be right, `used` those that reached the optimizer. `determined`: the gradients of the
    micro-batches tell all weights apart. `vacuous`: the model has so few parameters that some weights always fit.
    `noise` is the standard error of the full-batch gradient, estimated from its micro-batches, relative to its norm.
    `samples`: how many were looked at where that is not all of the batch: then there are no weights, and the noise is
    that of all.
    """

    weights: tuple[float, ...]
    residual: float
    determined: bool = True
    noise: float = math.nan
    vacuous: bool = False
    used: tuple[float, ...] = ()
    used_residual: float = 0.0
    factor: float = math.nan
    factor_residual: float = math.inf
    samples: int | None = None

    @property
    def multipliers(self) -> tuple[float, ...]:
        """weights_k / used_k: what each micro-batch's loss should be multiplied by, 1 where its weight is right.

        A micro-batch that never reached the step (used 0) is held against the usual weight of the others.
        """
        present = sorted(abs(weight) for weight in self.used if abs(weight) > NO_WEIGHT * max(map(abs, self.used)))
        usual = present[len(present) // 2] if present else 1.0
        return tuple(
            right / (used if abs(used) > NO_WEIGHT * usual else usual)
            for right, used in zip(self.weights, self.used, strict=True)
        )


class TermKind(Enum):
    """What a term of a loss is that nothing divides."""

    SUM = "over the samples"
    PENALTY = "the same in every micro-batch"


@dataclass(frozen=True)
class Count:
    """What one operation divides by, or multiplies by (`times`), in each micro-batch and in the whole window.

    `counts`: the window's is the sum of theirs, so that it takes the place of the micro-batch's weight as well; else
    their mean. `added_up`: the micro-batches' losses are added up instead, where they were weighted. `term`: nothing
    is divided, the operation makes a term of the loss that counts otherwise than the micro-batches are weighted.
    """

    operation: Operation
    own: tuple[float, ...]
    window: float
    counts: bool = True
    added_up: bool = False
    times: bool = False
    term: TermKind | None = None


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss that is a sum, differentiated alone in both runs at the same weights.

    `fit` is that of its own gradient, and `samples` says whether that differs between micro-batches: that of a penalty
    on the parameters is the same. The file and line are those that made it, where they are known.
    """

    number: int
    count: int
    fit: WeightFit
    samples: bool = True
    file: str | None = None
    line: int | None = None


def are_shares(
    fitted: Sequence[float], amounts: Sequence[float], rel_tol: float = COMPUTED_FLOAT32, abs_tol: float = NO_WEIGHT
) -> bool:
    """Whether weights are the shares of some amounts."""
    total = sum(amounts)
    return (
        len(amounts) == len(fitted)
        and total > 0
        and all(
            math.isclose(weight, amount / total, rel_tol=rel_tol, abs_tol=abs_tol)
            for weight, amount in zip(fitted, amounts, strict=True)
        )
    )


def is_constant(values: Sequence[float], residual: float = 0.0) -> bool:
    """Whether all values are the same number, as far as a fit with this residual can tell."""
    return alike(values, max(SAME_NUMBER, FIT_MAGNIFIES * residual))


def are_ones(weights: Sequence[float], residual: float) -> bool:
    """Whether weights leave every loss as it is, as far as a fit with this residual can tell: the losses are sums."""
    return is_constant((1.0, *weights), residual)


def alike(values: Sequence[float], rel_tol: float) -> bool:
    """Whether all values are the same number, up to a relative tolerance."""
    return bool(values) and all(math.isclose(value, values[0], rel_tol=rel_tol) for value in values)


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
    LOST = "losses that never reach a gradient, taken as zero"
    COUNTS = "the window's counts in the place of each micro-batch's own"
    FULL_BATCH = "what code gives and gives back, taken from the full batch"
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
