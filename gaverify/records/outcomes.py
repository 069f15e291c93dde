"""The result of comparing two gradients: a row per parameter, the method that decided, and the outcome of all rows.

Strings and floats only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gaverify.records.json_objects import JsonRecord, json_object
from gaverify.records.numbers import Number
from gaverify.thresholds import TENTH


class Method(str, Enum):
    """The method that decided; the values are what JSON prints.

    `EVENTS`: only the order of a script's calls was looked at.
    """

    WORKING_PRECISION = "working-precision"
    FLOAT64_CONTROL = "float64-control"
    NOISE_FLOOR = "noise-floor"
    TWO_SAMPLES = "two-samples"
    FEW_SAMPLES = "few-samples"
    WEIGHTS = "weights"
    FLOAT32_RUNS = "float32-runs"
    FLOAT64_PART = "float64-part"
    TOLERANCE = "tolerance"
    NOT_COMPARED = "not-compared"
    EVENTS = "events"

    def __str__(self) -> str:
        """The value, as in documents."""
        # Without this, an f-string writes the class and the member in some versions of Python.
        return str(self.value)


TOGETHER = (Method.FEW_SAMPLES, Method.WEIGHTS)
"""Methods that decide all parameters at once: `allowed` is then a share of the whole gradient."""


class NotCompared(Enum):
    """Why the numbers of a parameter's gradients could not be compared; the values are the words of all reports."""

    UNUSED = "unused: no gradient on either side"
    MISSING_IN_FULL = "no gradient (None) in the full-batch run only"
    MISSING_IN_ACCUMULATED = "no gradient (None) in the accumulated run only"
    NOT_FINITE_IN_FULL = "not finite in the full-batch run only"
    NOT_FINITE_IN_ACCUMULATED = "not finite in the accumulated run only"
    NOT_FINITE_IN_BOTH = "not finite in both runs"

    @property
    def missing(self) -> bool:
        """Whether one run alone has no gradient (None)."""
        return self in (NotCompared.MISSING_IN_FULL, NotCompared.MISSING_IN_ACCUMULATED)

    @property
    def not_finite(self) -> bool:
        """Whether a gradient holds NaN or infinity; else there is none."""
        return not self.missing and self is not NotCompared.UNUSED


class Outcome(str, Enum):
    """The result for a batch or for one parameter; the values are what JSON prints."""

    EQUIVALENT = "equivalent"
    DIVERGENT = "divergent"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """0, 1 or 3, as the command line leaves."""
        return {"equivalent": 0, "divergent": 1, "inconclusive": 3}[self.value]


# A tuple, as `ParameterComparison` below.
@json_object()
class Element(NamedTuple):
    """The element of a gradient with the largest difference: its index and the two values (moduli where complex)."""

    index: tuple[int, ...]  # type: ignore[assignment]
    """Index in the parameter's shape."""
    reference: Number
    """Value in the full batch's gradient; the modulus where complex."""
    accumulated: Number
    """Value in the accumulated gradient; the modulus where complex."""


# A tuple, not a frozen dataclass: models have thousands of these, and each must be built in less than a microsecond.
@json_object("name", "outcome", "relative_difference")
class ParameterComparison(NamedTuple):
    """One parameter's gradients from both strategies, in the precision that decided; all norms are Euclidean."""

    name: str
    """Name of the parameter in the model."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    outcome: Outcome
    """Whether its gradients agree."""
    method: Method
    """The method that decided it."""
    reference_norm: Number
    """Norm of the full batch's gradient; NaN where it is not finite or absent."""
    accumulated_norm: Number
    """Norm of the accumulated gradient; NaN where it is not finite or absent."""
    difference_norm: Number
    """Norm of accumulated − full; NaN where it has no finite value."""
    allowed: Number
    """Largest `difference_norm` that rounding, or the user's tolerance, explains."""
    working_difference_norm: Number
    """Norm of accumulated − full in the user's precision."""
    worst: Element | None
    """The element with the largest difference; None where none was looked for."""
    why: NotCompared | None = None
    """Why the gradients could not be compared; None where they were."""

    @property
    def word(self) -> str:
        """The outcome in a table: `unused` where neither run has a gradient."""
        return "unused" if self.why is NotCompared.UNUSED else self.outcome.value

    @property
    def reason(self) -> str:
        """Why nothing was compared, in words; empty where it was."""
        return self.why.value if self.why is not None else ""

    @property
    def relative_difference(self) -> Number:
        """‖accumulated − full‖ / ‖full‖; 0 where both are zero, infinite where only the full-batch gradient is."""
        return _relative(self.difference_norm, self.reference_norm)

    @property
    def relative_allowed(self) -> float:
        """`allowed` / ‖full‖, comparable with `relative_difference`."""
        return _relative(self.allowed, self.reference_norm)

    @property
    def vanishing(self) -> bool:
        """Whether the full-batch gradient is zero, or no larger than rounding is in the arithmetic that decided."""
        # A tolerance is what a user asks for, and tells nothing of the arithmetic.
        return self.reference_norm == 0.0 or (self.method != "tolerance" and self.reference_norm <= self.allowed)


def badness(row: ParameterComparison) -> tuple[int, float]:
    """A sort key that puts the worst parameter last: outcome first, then how large the difference is.

    Divergent ones by the relative difference, others by the difference over what was allowed.
    """
    rank = {Outcome.EQUIVALENT: 0, Outcome.INCONCLUSIVE: 1, Outcome.DIVERGENT: 2}[row.outcome]
    if math.isnan(row.difference_norm):
        # Without a number, a divergence is the worst of all, and anything else the least.
        return rank, math.inf if row.outcome is Outcome.DIVERGENT else -1.0
    if row.outcome is Outcome.DIVERGENT:
        return rank, row.relative_difference
    return rank, _relative(row.difference_norm, row.allowed)


def _relative(difference: float, scale: float) -> float:
    # Two gradients of zero are equal, although the quotient would be NaN.
    if difference == 0.0:
        return 0.0
    return difference / scale if scale != 0.0 else math.inf


class Reference(str, Enum):
    """The ways to run the full batch's forward and backward; the values are what specs and JSON say.

    `AUTO` is only ever asked for: it stands for `FULL`, or for `OFFLOAD` where that does not fit.
    """

    FULL = "full"
    OFFLOAD = "offload"
    AUTO = "auto"

    def __str__(self) -> str:
        """The value, as in documents."""
        # Without this, an f-string writes the class and the member in some versions of Python.
        return str(self.value)


def together(outcomes: Iterable[Outcome]) -> Outcome:
    """Returns divergent if any is, equivalent if all are and there is one, inconclusive otherwise."""
    distinct = set(outcomes)
    if Outcome.DIVERGENT in distinct:
        return Outcome.DIVERGENT
    return Outcome.EQUIVALENT if distinct == {Outcome.EQUIVALENT} else Outcome.INCONCLUSIVE


def outcome_of(rows: Sequence[ParameterComparison]) -> Outcome:
    """Returns the outcome of all parameters; inconclusive where no fault could have been seen.

    So it is where every gradient is zero, and where a tenth of the whole gradient could hide in what is rounding.
    """
    outcome = together(row.outcome for row in rows)
    # Gradients of zero agree whatever a fault makes of them: a dead network proves nothing.
    informative = any(row.reference_norm > 0 or row.accumulated_norm > 0 for row in rows)
    blind = not informative or hidden_share(rows) > TENTH
    return Outcome.INCONCLUSIVE if outcome is Outcome.EQUIVALENT and blind else outcome


def hidden_share(rows: Iterable[ParameterComparison]) -> float:
    """Returns the smallest difference that could have been seen, as a share of the whole gradient; 0 for none.

    Tolerances that were asked for hide what they hide.
    """
    rows = [row for row in rows if row.why is None and row.method != Method.TOLERANCE]
    # Their `allowed` is of the whole gradient already: added up it would count once for each parameter.
    if rows and all(row.method in TOGETHER for row in rows):
        return resolution_of(rows)
    return relative_total((row.allowed, row.reference_norm) for row in rows)


def relative_total(norms: Iterable[tuple[float, float]]) -> float:
    """Returns √(Σ difference²) / √(Σ reference²) over pairs (difference, reference) of norms; NaN pairs are left out.

    0 where nothing differs, infinite where something differs from zero.
    """
    finite = [pair for pair in norms if math.isfinite(pair[0]) and math.isfinite(pair[1])]
    difference = math.hypot(*(pair[0] for pair in finite))
    reference = math.hypot(*(pair[1] for pair in finite))
    if difference == 0.0:
        return 0.0
    return difference / reference if reference > 0.0 else math.inf


def resolution_of(rows: Iterable[ParameterComparison]) -> float:
    """Returns the smallest relative difference that could have been seen in the least clear parameter; NaN in none.

    Where all parameters were decided together, it is that of the whole gradient.
    """
    rows = [row for row in rows if row.why is None]
    if rows and all(row.method in TOGETHER for row in rows):
        return max(row.allowed for row in rows) / math.hypot(*(row.reference_norm for row in rows))
    # Nothing can be said relative to a gradient that vanishes in the arithmetic that decided.
    allowances = [row.relative_allowed for row in rows if not row.vanishing and math.isfinite(row.relative_allowed)]
    return max((value for value in allowances if value > 0), default=math.nan)


@dataclass(frozen=True)
class PrecisionLoss:
    """Relative errors of both gradients in the working dtype, against float64."""

    dtype: str
    """Name of the working dtype: "bfloat16"."""
    full: float
    """Relative error of the full batch's gradient."""
    accumulated: float
    """Relative error of the accumulated gradient; with `samples`, including what adding up lost."""
    in_float32: float | None = None
    """Relative error if the same micro-batch gradients are added up in float32; None where that was not tried."""
    samples: int = 0
    """Number of samples that the errors were measured on; 0 for all of the batch."""

    @property
    def bits_lost(self) -> float:
        """How many bits less the accumulated gradient has."""
        return _bits(self.accumulated, self.full)

    @property
    def bits_regained(self) -> float:
        """How many bits a sum in float32 has more; infinite where that was not tried."""
        return math.inf if self.in_float32 is None else _bits(self.accumulated, self.in_float32)


def _bits(error: float, smaller: float) -> float:
    return math.log2(error / smaller) if error > 0 and smaller > 0 else 0.0


@dataclass(frozen=True)
class FewSamples(JsonRecord):
    """The decision of a window below float32: its weights by fit, and the result of a few of its samples."""

    samples: int
    """Number of samples that were run."""
    structure: Number
    """Difference in float64 between these samples at once and one by one, relative to their gradient."""
    rounding: Number
    """The same difference in the working precision."""
    error: Number
    """Difference of the working precision from float64, relative to the samples' gradient."""
    rest: Number = math.nan
    """Relative part of the full batch's gradient that no weights of micro-batches explain; NaN if not measured."""
    weights: Number = math.nan
    """Largest relative difference between the weights that fit best and those that were used; NaN if not measured."""
    lost: Number = math.nan
    """Loss from adding up in the parameters' precision, relative to the whole gradient; NaN if not measured."""
    allowed: Number = math.nan
    """Largest difference of the whole gradient that is rounding, relative to it; NaN if not derived."""


@dataclass(frozen=True)
class Compared:
    """Both gradients compared parameter by parameter, and the method that decided."""

    rows: tuple[ParameterComparison, ...]
    """Comparison of each parameter's gradient."""
    method: Method
    """Method that decided."""
    control_failure: str = ""
    """Why the float64 control could not run; "" where it could or was not needed."""
    precision: PrecisionLoss | None = None
    """Relative errors of both gradients; None where they were not measured."""
    update: int | None = None
    """Number of the optimizer update in a training loop; None in a run."""

    @property
    def divergent(self) -> tuple[ParameterComparison, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if row.outcome is Outcome.DIVERGENT)

    @property
    def comparable(self) -> bool:
        """Whether every divergent row has finite numbers on both sides."""
        return all(math.isfinite(row.difference_norm) for row in self.divergent)

    @property
    def one_sided(self) -> tuple[ParameterComparison, ...]:
        """The divergent rows with a gradient in one run alone."""
        return tuple(row for row in self.divergent if row.why is not None and row.why.missing)

    @property
    def largest(self) -> str:
        """The largest relative difference as text, with the parameter that shows it."""
        rows = [row for row in self.divergent if math.isfinite(row.relative_difference)]
        # A gradient that is zero but for rounding may differ by a factor on correct code.
        rows = [row for row in rows if not row.vanishing] or rows
        if not rows:
            return "no finite difference"
        row = max(rows, key=lambda row: row.relative_difference)
        return f"relative difference {row.relative_difference:.1e} in `{row.name}`"

    @property
    def total(self) -> float:
        """‖accumulated − full‖ / ‖full‖ over all parameters; infinite where a divergent one has no number."""
        if not self.comparable:
            return math.inf
        return relative_total((row.difference_norm, row.reference_norm) for row in self.rows)

    @property
    def scale(self) -> tuple[float, float]:
        """The factor c in accumulated ≈ c · full over all parameters, and what it leaves over relative to ‖full‖."""
        rows = [row for row in self.rows if math.isfinite(row.difference_norm)]
        reference = sum(row.reference_norm**2 for row in rows)
        if reference == 0.0:
            return math.nan, math.inf
        # Norms suffice, because a·e = (‖a‖² + ‖e‖² − ‖a − e‖²) / 2.
        factor = sum(row.accumulated_norm**2 + row.reference_norm**2 - row.difference_norm**2 for row in rows) / 2
        factor /= reference
        squared_residual = sum(row.accumulated_norm**2 for row in rows) - factor**2 * reference
        # Cancellation may leave a residual of zero slightly below it.
        return factor, math.sqrt(max(squared_residual, 0.0) / reference)
