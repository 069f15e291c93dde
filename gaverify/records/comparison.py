"""What a comparison of two gradients came to: one row per parameter, strings and floats only."""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple


class Method(str, Enum):
    """What decided; the values are what JSON prints.

    `EVENTS`: only the order of a script's calls was looked at. `MICRO_BATCH_FLOOR` stands in older documents only.
    """

    WORKING_PRECISION = "working-precision"
    FLOAT64_CONTROL = "float64-control"
    NOISE_FLOOR = "noise-floor"
    TWO_SAMPLES = "two-samples"
    FEW_SAMPLES = "few-samples"
    WEIGHTS = "weights"
    MICRO_BATCH_FLOOR = "micro-batch-floor"
    FLOAT64_PART = "float64-part"
    TOLERANCE = "tolerance"
    NOT_COMPARED = "not-compared"
    EVENTS = "events"

    def __str__(self) -> str:
        """The value, as in documents."""
        return str(self.value)


TOGETHER = (Method.FEW_SAMPLES, Method.WEIGHTS)
"""Methods that decide all parameters at once: `allowed` is then a share of the whole gradient."""


class Side(str, Enum):
    """One of the two runs, or both of them."""

    FULL = "full-batch"
    ACCUMULATED = "accumulated"
    BOTH = "both"


class NotCompared(Enum):
    """Why the numbers of a parameter's gradients could not be compared.

    Each has two attributes: `not_finite` (a gradient holds NaN or infinity; else there is none), and the `side`.
    """

    UNUSED = (False, Side.BOTH)
    MISSING_IN_FULL = (False, Side.FULL)
    MISSING_IN_ACCUMULATED = (False, Side.ACCUMULATED)
    NOT_FINITE_IN_FULL = (True, Side.FULL)
    NOT_FINITE_IN_ACCUMULATED = (True, Side.ACCUMULATED)
    NOT_FINITE_IN_BOTH = (True, Side.BOTH)

    def __init__(self, not_finite: bool, side: Side) -> None:
        self.not_finite = not_finite
        self.side = side

    @property
    def missing(self) -> bool:
        """Whether one run alone has no gradient (None)."""
        return self in (NotCompared.MISSING_IN_FULL, NotCompared.MISSING_IN_ACCUMULATED)

    @property
    def text(self) -> str:
        """The words that reports and documents print."""
        if self is NotCompared.UNUSED:
            return "unused: no gradient on either side"
        where = "both runs" if self.side is Side.BOTH else f"the {self.side.value} run only"
        return f"no gradient (None) in {where}" if self.missing else f"not finite in {where}"


class Outcome(str, Enum):
    """What a verification, or one parameter of it, came to; the values are what JSON prints."""

    EQUIVALENT = "equivalent"
    DIVERGENT = "divergent"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """0, 1 or 3, as the command line leaves."""
        return {"equivalent": 0, "divergent": 1, "inconclusive": 3}[self.value]


class Element(NamedTuple):
    """The element of a gradient with the largest difference: its index and the two values (moduli where complex)."""

    index: tuple[int, ...]  # type: ignore[assignment]
    reference: float
    accumulated: float


class ParameterComparison(NamedTuple):
    """One parameter's gradients from both strategies, in the precision that decided.

    All norms are Euclidean. `allowed` is the largest `difference_norm` that rounding explains. NaN norms stand for
    gradients that were not finite, or that did not exist (`why` says which). A tuple, not a dataclass, because
    models have thousands of these and building them must cost less than a microsecond each.
    """

    name: str
    shape: tuple[int, ...]
    outcome: Outcome
    method: Method
    reference_norm: float
    accumulated_norm: float
    difference_norm: float
    allowed: float
    working_difference_norm: float
    worst: Element | None
    why: NotCompared | None = None

    @property
    def reason(self) -> str:
        """Why nothing was compared, in words; empty where it was."""
        return self.why.text if self.why is not None else ""

    @property
    def relative_difference(self) -> float:
        """‖accumulated − full‖ / ‖full‖; 0 where both are zero, infinite where only the full-batch gradient is."""
        return _relative(self.difference_norm, self.reference_norm)

    @property
    def relative_allowed(self) -> float:
        """`allowed` / ‖full‖, comparable with `relative_difference`."""
        return _relative(self.allowed, self.reference_norm)

    @property
    def vanishing(self) -> bool:
        """Whether the full-batch gradient is zero, or no larger than rounding is in the arithmetic that decided.

        Nothing can be said relative to such a gradient. Tolerances that a user asks for are no arithmetic.
        """
        return self.reference_norm == 0.0 or (self.method != "tolerance" and self.reference_norm <= self.allowed)


def badness(row: ParameterComparison) -> tuple[int, float]:
    """A sort key that puts the worst parameter last: outcome first, then how large the difference is.

    Divergent ones by the relative difference, others by the difference over what was allowed.
    """
    rank = {Outcome.EQUIVALENT: 0, Outcome.INCONCLUSIVE: 1, Outcome.DIVERGENT: 2}[row.outcome]
    if math.isnan(row.difference_norm):
        return rank, math.inf if row.outcome is Outcome.DIVERGENT else -1.0
    if row.outcome is Outcome.DIVERGENT:
        return rank, row.relative_difference
    return rank, _relative(row.difference_norm, row.allowed)


def _relative(difference: float, scale: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / scale if scale != 0.0 else math.inf


class Reference(str, Enum):
    """The ways to run the full batch's forward and backward; the values are what specs and JSON say.

    `AUTO` is only ever asked for: it stands for the first of the others, in this order, that fits.
    """

    FULL = "full"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    AUTO = "auto"

    def __str__(self) -> str:
        """The value, as in documents."""
        return str(self.value)
