"""What the probes measured, as plain frozen records: the rules read nothing else.

Shapes: B samples in K micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gaverify.results import Location, Outcome, ParameterComparison

BITS_WORTH_A_NOTE = 0.5
"""Bits that an accumulated gradient loses against the full-batch one before anybody is told."""
FunctionKey = tuple[str, tuple[str, int] | None, int]
"""A call of a torch function: its name, the line of the user's code, the how-manieth of this name on this line."""
SuspectKind = Literal["rows", "matrix", "non-additive", "control-flow", "random"]


@dataclass(frozen=True)
class WeightFit:
    """g_full ≈ Σ c_k g_k: the weights c, what they leave over relative to ‖g_full‖, whether c is determined.

    `vacuous`: the model has so few parameters that some c always fits.
    `noise` is the standard error of the full-batch gradient, estimated from its micro-batches, relative to its norm.
    """

    weights: tuple[float, ...]
    residual: float
    determined: bool
    noise: float = math.nan
    vacuous: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation: its name at the dispatcher, the module path around it, and the user's line."""

    name: str
    module: str | None = None
    kind: str = ""
    library: bool = False
    file: str | None = None
    line: int | None = None
    source: str = ""

    @property
    def location(self) -> Location:
        """Module path and class, file and line."""
        return Location(self.module, self.kind or None, self.file, self.line)

    def __str__(self) -> str:
        where = f"`{self.name}`"
        if self.file is not None:
            where += f" at {self.file}:{self.line}"
        return where + (f" in `{self.module}`" if self.module else "")


@dataclass(frozen=True)
class Suspect:
    """The first operation whose result for the same samples depends on the batch that they came in.

    `source` is the reduction over the batch that it reads, where there is one; `in_model`: outputs of a module of the
    model differ by it, sample by sample; `statistics`: the module around it scales channels by batch statistics.
    `functions` are the torch calls whose results a control run holds constant, `source_functions` those of the
    reductions, `exits` those whose samples differ next; `frame` is the line where the code decides, of a suspect of
    kind "control-flow"; `calls` are the module calls around the operation.
    """

    kind: SuspectKind
    operation: Operation
    source: Operation | None
    difference: float
    samples: int
    in_model: bool
    statistics: bool
    functions: tuple[FunctionKey, ...] = ()
    source_functions: tuple[FunctionKey, ...] = ()
    exits: tuple[FunctionKey, ...] = ()
    frame: tuple[str, int] | None = None
    calls: tuple[int, ...] = ()

    @property
    def culprit(self) -> Operation:
        """Where samples meet first: the reduction, or the operation itself."""
        return self.source or self.operation


@dataclass(frozen=True)
class ControlRun:
    """Both strategies run again with a suspect neutralised, or with a remedy applied.

    `left` is the difference that stays, relative to the full-batch gradient's norm; `fit` the weights that would be
    right in this run, where they were asked for.
    """

    what: str
    left: float
    rounding: bool
    fit: WeightFit | None = None


@dataclass(frozen=True)
class Cause:
    """A suspect, the control run that neutralised it, and the remedies that were run.

    `explained`: the share of the divergence that went away with it; `alone`: the difference that it makes by itself,
    with every other cause neutralised.
    """

    suspect: Suspect
    control: ControlRun | None
    remedies: tuple[ControlRun, ...] = ()
    explained: float = math.nan
    alone: float = math.nan


@dataclass(frozen=True)
class StateChange:
    """A value that the forward changes: where it lives, and the line that wrote it."""

    name: str
    place: Literal["parameter", "buffer", "attribute", "closure", "unnamed"]
    drifts: bool
    writer: Operation | None = None


@dataclass(frozen=True)
class StateProbe:
    """What the forward changes, and the control run with it held still (or restored before each micro-batch).

    `alone`: the difference that the blamed changes make by themselves, with every other cause neutralised.
    """

    changes: tuple[StateChange, ...]
    control: ControlRun | None = None
    blamed: tuple[StateChange, ...] = ()
    remedies: tuple[ControlRun, ...] = ()
    alone: float = math.nan


@dataclass(frozen=True)
class SampleCoupling:
    """On how many `others` the outputs of one sample depend, and the largest gradient by its own one's norm."""

    sample: int
    others: int
    strength: float


@dataclass(frozen=True)
class Repeatability:
    """The full batch run twice with everything known restored."""

    forward: float
    backward: float


@dataclass(frozen=True)
class PrecisionLoss:
    """Relative error against float64 of the full-batch and of the accumulated gradient, in the working dtype."""

    dtype: str
    full: float
    accumulated: float
    in_float32: float | None = None

    @property
    def bits_lost(self) -> float:
        """How many bits less the accumulated gradient has."""
        if not (self.full > 0 and self.accumulated > 0):
            return 0.0
        return math.log2(self.accumulated / self.full)


@dataclass
class Measurements:
    """What was measured about one judged task."""

    rows: tuple[ParameterComparison, ...]
    steps: int
    batch_size: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    weighting: str
    micro_losses: tuple[float, ...]
    method: str
    valid_targets: tuple[float, ...]
    ignored_targets: bool
    draws: int
    draws_sliced: int
    draws_unaligned: dict[str, str]
    foreign_draws_differ: bool
    identical: bool
    draw_control: ControlRun | None = None
    draws_alone: float = math.nan  # what draws that could not be dealt out make by themselves, beside other causes
    draw_places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    control_failure: str = ""
    fit: WeightFit | None = None
    weight_remedy: ControlRun | None = None
    causes: tuple[Cause, ...] = ()
    forwards_agree: bool = False
    loss_gap: float = math.nan
    left: float = math.nan
    cleared: bool = False
    state: StateProbe | None = None
    repeatability: Repeatability | None = None
    precision: PrecisionLoss | None = None
    drift: Mapping[str, float] = field(default_factory=dict)
    hooked: tuple[str, ...] = ()
    coupling: SampleCoupling | None = None
    backward_culprit: Operation | None = None
    backward_control: ControlRun | None = None
    ruled_out: tuple[str, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    diagnosed: bool = False

    @property
    def repeats(self) -> float:
        """The relative difference of two runs of the same batch that arithmetic without a fixed order may leave."""
        return 1e-9 if self.method == "float64-control" else 1e-4

    @property
    def divergent(self) -> tuple[ParameterComparison, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if row.outcome is Outcome.DIVERGENT)

    @property
    def comparable(self) -> bool:
        """Whether every divergent row has finite numbers on both sides."""
        return all(math.isfinite(row.difference_norm) for row in self.divergent)

    @property
    def largest(self) -> str:
        """The largest relative difference as text, with the parameter that shows it."""
        most = max((row.reference_norm for row in self.rows if math.isfinite(row.reference_norm)), default=0.0)
        # relative to a gradient that is zero but for rounding, any difference looks enormous
        rows = [row for row in self.divergent if math.isfinite(row.relative_difference)]
        rows = [row for row in rows if row.reference_norm > 1e-6 * most] or rows
        if not rows:
            return "no finite difference"
        row = max(rows, key=lambda row: row.relative_difference)
        return f"relative difference {row.relative_difference:.1e} in `{row.name}`"

    @property
    def total(self) -> float:
        """‖accumulated − full‖ / ‖full‖ over all parameters with finite numbers."""
        rows = [row for row in self.rows if math.isfinite(row.difference_norm)]
        reference = sum(row.reference_norm**2 for row in rows)
        difference = sum(row.difference_norm**2 for row in rows)
        return math.sqrt(difference / reference) if reference > 0 else math.inf if difference > 0 else 0.0

    @property
    def scale(self) -> tuple[float, float]:
        """The factor c in accumulated ≈ c · full over all parameters, and what it leaves over relative to ‖full‖.

        From the norms alone: a·e = (‖a‖² + ‖e‖² − ‖a − e‖²) / 2.
        """
        rows = [row for row in self.rows if math.isfinite(row.difference_norm)]
        reference = sum(row.reference_norm**2 for row in rows)
        if reference == 0.0:
            return math.nan, math.inf
        factor = sum(row.accumulated_norm**2 + row.reference_norm**2 - row.difference_norm**2 for row in rows) / 2
        factor /= reference
        left = sum(row.accumulated_norm**2 for row in rows) - factor**2 * reference
        return factor, math.sqrt(max(left, 0.0) / reference)


def are_shares(fitted: tuple[float, ...], amounts: tuple[float, ...]) -> bool:
    """Whether weights are the shares of some amounts."""
    total = sum(amounts)
    return (
        len(amounts) == len(fitted)
        and total > 0
        and all(
            math.isclose(c, amount / total, rel_tol=1e-4, abs_tol=1e-6)
            for c, amount in zip(fitted, amounts, strict=True)
        )
    )


def is_constant(values: Sequence[float], residual: float = 0.0) -> bool:
    """Whether all values are the same number, as far as a fit with this residual can tell."""
    tolerance = max(1e-7, 10 * residual)
    return bool(values) and all(math.isclose(value, values[0], rel_tol=tolerance) for value in values)
