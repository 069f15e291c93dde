"""The suspects and control runs of a search: operations and suspects, weights that explain a gradient, control runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from gaverify.records.findings import Location
from gaverify.records.json_objects import JsonRecord
from gaverify.records.numbers import Number
from gaverify.thresholds import COMPUTED_FLOAT32, FIT_MAGNIFIES, NO_WEIGHT, SAME_NUMBER

FunctionKey = tuple[str, tuple[str, int] | None, int]
"""A call of a torch function: its name, the line of the user's code, the how-manieth of this name on this line."""
MOVES_ROWS = frozenset({"index", "index_select", "flip", "roll", "gather", "take"})
"""Operations of the dispatcher that compute nothing: where they couple samples, a row met another one's."""
SuspectKind = Literal["rows", "matrix", "non-additive", "control-flow", "random", "values"]


@dataclass(frozen=True)
class Operation:
    """One operation of a forward or a backward, and where it is."""

    name: str
    """Its name at the dispatcher: "native_batch_norm"."""
    module: str | None = None
    """Path of the innermost module of the model around it; None outside of all."""
    kind: str = ""
    """Class of that module."""
    file: str | None = None
    """The file that a reader knows; None where there is no such line."""
    line: int | None = None
    """Line in `file`."""
    source: str = ""
    """Text of that line."""
    caller: str = ""
    """Beside a line of a library: the loss around the operation, and the nearest line of the user's own code."""

    @property
    def location(self) -> Location:
        """Module path and class, file and line."""
        return Location(self.module, self.kind or None, self.file, self.line)

    @property
    def place(self) -> tuple[str, str, str | None, int | None]:
        """The key that tells operations apart: its name, its module and its line."""
        # A line number without a file would tell equal operations of a library apart.
        return self.name, self.module or "", self.file, self.line if self.file is not None else None

    def __str__(self) -> str:
        where = f"`{self.name}`"
        if self.file is not None:
            where += f" at {self.file}:{self.line}"
        return where + (f" in `{self.module}`" if self.module else "")


@dataclass(frozen=True)
class ModuleDifference(JsonRecord):
    """How much a module's outputs for the same samples differ between the full batch and the micro-batches."""

    module: str
    """Path of the module."""
    difference: Number
    """Relative to the largest value of an output; 0 where they agree to rounding."""


@dataclass(frozen=True)
class DifferingNumber:
    """A Python number that a call is given, and that differs between the runs."""

    name: str
    """The script's variable; empty where none holds it."""
    full: float
    """The full batch's."""
    micro_batches: tuple[float, ...]
    """Those of the micro-batches."""


@dataclass(frozen=True)
class LossValue:
    """A value that a script's loop hands to the loss beside the model's outputs, and that differs for the same rows."""

    name: str
    """The script's variable; empty where none holds it."""
    reader: Operation
    """The computation with a gradient that reads it."""
    is_reordered: bool = False
    """Whether the micro-batches hold the full batch's values, and at other rows."""
    made_with: DifferingNumber | None = None
    """A number that differs where the value is made; None where there is none."""
    assigned: tuple[Operation, ...] = ()
    """Lines that assign what holds that number, or what it may be computed from; empty where none is known."""


@dataclass(frozen=True)
class Suspect:
    """The first operation whose result for the same samples depends on the batch that they came in."""

    kind: SuspectKind
    """How it depends on the batch: rows, a cross-sample matrix, a non-additive loss, control flow or random draws.

    "values": what a script's loop hands to the loss beside the model's outputs differs for the same rows.
    """
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
    functions_on_equal_lines: tuple[FunctionKey, ...] = ()
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
    pairs: bool = False
    """Whether the operation reads rows that lie in another order: each sample has a partner from its batch."""
    lacking: Operation | None = None
    """The first operation that some forwards do not run; None unless `kind` is "control-flow"."""
    value: LossValue | None = None
    """The value that the loss is handed, where `kind` is "values"."""

    @property
    def is_branch_on_shape(self) -> bool:
        """Whether some forwards do not run the operation, although no number was read before it."""
        return self.lacking is not None and self.frame is None

    @property
    def culprit(self) -> Operation:
        """Where samples meet first: the reduction, or the operation itself."""
        return self.source or self.operation


@dataclass(frozen=True)
class WeightFit(JsonRecord):
    """Least squares over the gradients of the K micro-batches; residuals are relative.

    g_full ≈ Σ weights_k g_k        g_used ≈ Σ used_k g_k        g_used ≈ factor · g_full
    """

    weights: tuple[Number, ...]
    """The weights that would be right; empty where `samples` is given."""
    residual: Number
    """Difference that `weights` leave, relative to the full batch's gradient."""
    determined: bool = True
    """Whether the micro-batches' gradients are independent enough to determine every single weight."""
    noise: Number = math.nan
    """Standard error of the full batch's gradient, estimated from its micro-batches, relative to its norm."""
    vacuous: bool = False
    """Whether the model has so few parameters that some weights always fit."""
    used: tuple[Number, ...] = ()
    """The weights with which the micro-batches reached the optimizer."""
    used_residual: Number = 0.0
    """Difference that `used` leaves, relative to the accumulated gradient."""
    factor: Number = math.nan
    """The one number by which the accumulated gradient differs from the full batch's."""
    factor_residual: Number = math.inf
    """Difference that `factor` leaves."""
    samples: int | None = None
    """Number of samples that were looked at, where that is not all of the batch; `noise` is still that of all."""

    @property
    def multipliers(self) -> tuple[float, ...]:
        """weights_k / used_k: what each micro-batch's loss should be multiplied by, 1 where its weight is right.

        A micro-batch that never reached the step (used 0) is compared with the median weight of the others.
        """
        # A fitted weight is never exactly zero.
        present = sorted(abs(weight) for weight in self.used if abs(weight) > NO_WEIGHT * max(map(abs, self.used)))
        usual = present[len(present) // 2] if present else 1.0
        return tuple(
            right / (used if abs(used) > NO_WEIGHT * usual else usual)
            for right, used in zip(self.weights, self.used, strict=True)
        )


class TermKind(Enum):
    """The kind of a term of a loss that nothing divides."""

    SUM = "over the samples"
    PENALTY = "the same in every micro-batch"


@dataclass(frozen=True)
class Count:
    """The divisors of one operation in each micro-batch, and in the accumulation window."""

    operation: Operation
    """The division, mean or product."""
    micro_batches: tuple[float, ...]
    """Its divisor in each micro-batch."""
    window: float
    """Its divisor in the full batch."""
    adds_up: bool = True
    """Whether `window` is the sum of these, so that dividing by it replaces the micro-batch's weight; else the mean."""
    added_up: bool = False
    """Whether the micro-batches' losses have to be added up, with weights of 1."""
    times: bool = False
    """Whether the operation multiplies by these numbers."""
    term: TermKind | None = None
    """For a term of the loss that nothing divides: what kind it is."""


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss that is a sum, differentiated alone in both runs at the same weights."""

    number: int
    """Its position in the sum, from 1."""
    count: int
    """Number of terms."""
    fit: WeightFit
    """Weights of the micro-batches in this term's own gradient."""
    samples: bool = True
    """Whether the term reads samples; a penalty on the parameters is the same in every micro-batch."""
    file: str | None = None
    """File of the line that made it; None where not known."""
    line: int | None = None
    """That line."""


def are_shares(
    fitted: Sequence[float], amounts: Sequence[float], rel_tol: float = COMPUTED_FLOAT32, abs_tol: float = NO_WEIGHT
) -> bool:
    """Whether weights are the shares of some amounts."""
    total = sum(amounts)
    return (
        len(amounts) == len(fitted)
        # Without anything counted there are no shares.
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
    """How a control run neutralised something, or what it put in its place."""

    RESULT_PINNED = "a result held constant"
    EVALUATION_MODE = "modules in eval mode, on stored statistics"
    CACHED_GRADIENTS = "the loss computed once over all outputs, the model backward per micro-batch"
    DECISIONS = "the full batch's decisions taken by every micro-batch"
    LARGER_MICRO_BATCHES = "micro-batches of more samples, which run the operations of the full batch"
    STATE_RESTORED = "the state restored before each micro-batch"
    STATE_ALIGNED = "the state before each update taken from the full-batch run"
    STATE_PRIMED = "one forward of the full batch before both runs, whose changes stay"
    STATE_PRIMED_AND_PINNED = "one forward of the full batch before both runs, writes to state without effect after it"
    STATE_PINNED = "writes to state without effect"
    DRAWS_PINNED = "every random draw held constant"
    WEIGHTS = "other micro-batch weights"
    COUNTS = "the window's counts in the place of each micro-batch's own"
    FULL_BATCH = "what code gives and gives back, taken from the full batch"
    GRADIENTS_KEPT = "gradients that a forward clears put back"
    REPLACED = "another layer in the place of one"
    FULL_BATCH_VALUE = "a value of the full batch held constant in every micro-batch, the full batch as it is"
    OTHER_CAUSES = "everything but one cause neutralised"


@dataclass(frozen=True)
class ControlRun:
    """Both strategies run again with a suspect neutralised, or with a remedy applied.

    Two facts say whether it had power, so that a difference that is gone proves something.
    """

    what: str
    """The control in words, for reports."""
    left: float
    """The difference that stays, relative to the norm of the full batch's gradient."""
    rounding: bool
    """Whether that is rounding."""
    fit: WeightFit | None = None
    """The weights that would be right in this run; None where they were not asked for."""
    kind: ControlKind = ControlKind.RESULT_PINNED
    """The control for rules."""
    values_differed: bool | None = None
    """Whether the values that it pinned were different before; None: it pins none."""
    cut_off: tuple[str, ...] = ()
    """Divergent parameters that are not connected to the loss in this run: whatever is wrong with them is hidden."""
    holds: bool = True
    """Whether, as a repair, it gave the full batch's gradient on a second batch as well, if one could be made."""
    modules: tuple[str, ...] = ()
    """The modules that it neutralised together."""
    interventions: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    """Its changes, as values that can be run again: on another experiment, or in other runs of a script."""

    @property
    def has_power(self) -> bool:
        """Whether the difference could still have been seen, and what was changed had been different."""
        return self.values_differed is not False and not self.cut_off

    @property
    def proves(self) -> bool:
        """Whether it leaves nothing, and that shows that the suspect made the difference."""
        return self.rounding and self.has_power

    @property
    def repairs(self) -> bool:
        """Whether it leaves nothing on this batch and on a second one."""
        return self.rounding and self.holds


@dataclass(frozen=True)
class Cause:
    """A suspect, and the runs that examined it."""

    suspect: Suspect
    """The operation."""
    control: ControlRun | None
    """The run that neutralised it in both strategies; None where none was possible."""
    remedies: tuple[ControlRun, ...] = ()
    """The runs with its repairs."""
    explained: float = math.nan
    """Share of the divergence that went away with it."""
    difference_alone: float = math.nan
    """Relative difference that it makes with every other cause neutralised."""
    failure: str = ""
    """Why no control run was possible, where there is none."""

    @property
    def lacks_power(self) -> bool:
        """Whether its control leaves nothing and shows nothing: then other causes are looked for, too."""
        return self.control is not None and self.control.rounding and not self.control.has_power


class DifferenceKind(Enum):
    """How two traced runs differ first."""

    VALUES = "other values for the same samples"
    STATE = "what an earlier micro-batch has left"
    BRANCH = "calls that one run alone makes"
    BACKWARD = "gradients that code during a backward pass changes"
    BETWEEN_PASSES = "gradients that change between two backward passes"
    AFTER_PASSES = "gradients that change otherwise after the last backward pass"


@dataclass(frozen=True)
class FirstDifference:
    """The first place where a script's two runs differ for the same samples, found by tracing both; no proof."""

    kind: DifferenceKind
    """How they differ there."""
    operation: Operation
    """The call; of a branch the line that decides; of state the one that leaves it."""
    reader: Operation | None = None
    """The call that reads the state, or a result without rows at another line; None where there is none."""
    name: str = ""
    """The owner of the state there; empty where that is not known."""
    in_model: bool = False
    """Whether a module of the model makes the call."""
    sources: tuple[Operation, ...] = ()
    """Calls whose results it reads, and which have no row for each sample: sums, means, matrices of samples."""
    difference: float = math.nan
    """Largest relative difference of a row or of a number; NaN where nothing was compared."""
    samples: int = 0
    """Samples whose rows differ; 0 where the result has no rows."""
    ratios: tuple[float, ...] = ()
    """Norm of each micro-batch's rows over that of the same rows in the full batch; empty without rows."""
    micro_batches: tuple[int, ...] = ()
    """The micro-batches that differ, from 0."""
    number: DifferingNumber | None = None
    """A Python number that it is given, and that differs; None where there is none."""
    assigned: tuple[Operation, ...] = ()
    """Lines that assign what holds the number, or what it may be computed from; empty where none is known."""
    control: ControlRun | None = None
    """Both runs with the full batch's value in every micro-batch; None where that was not possible."""
