"""Decides what a measured difference means: rounding, a fault, or nothing that can be told. Plain numbers, no torch.

    Δ      ‖accumulated − full‖₂ of one parameter
    u      unit roundoff of the arithmetic that Δ was measured in
    scale  the largest of both gradients' norms and, where it is known, Σ|terms| of the sum that the gradient is

Rounding shrinks with u, a fault does not (CONTRIBUTING.md). So a Δ of a few u of the scale is rounding; what is above
that has to be explained by how it shrank from working precision to float64, or by the noise floor: how far the same
gradient moves when each weight is rounded otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gaverify.records.outcomes import Element, Method, NotCompared, Outcome, ParameterComparison
from gaverify.thresholds import CAPPED_UNITS, COARSE, COARSE_FLOORS, FEW_TIMES, FEW_UNITS, FINE, FINE_FLOORS, U32, U64


class Difference(NamedTuple):
    """The measured numbers of one parameter. NaN in `difference` where a side is missing or not finite."""

    name: str
    shape: tuple[int, ...]
    reference: float
    accumulated: float
    difference: float
    worst: Element | None
    why: NotCompared | None

    @property
    def scale(self) -> float:
        """The larger of the two norms."""
        return max(self.reference, self.accumulated)


class Grounds(NamedTuple):
    """The facts about the rounding in one parameter's difference.

    Args:
        method: Which question is put: working precision, two samples, float64 control or noise floor.
        unit: Unit roundoff u of the arithmetic that the difference was measured in.
        terms: Σ|terms| where the gradient is a sum and they were seen; 0 where not.
        working: The same difference in working precision, for the float64 control; NaN where there was none.
        working_unit: Its unit roundoff.
        floor: How far the gradient moves when each weight is rounded otherwise, or, for two samples, how far working
            precision rounds it; None where that was not measured.
        zero: The gradient is nothing but rounding: in float64 that of two samples is zero.
    """

    method: Method
    unit: float
    terms: float = 0.0
    working: float = math.nan
    working_unit: float = 0.0
    floor: float | None = None
    zero: bool = False


def decide(row: Difference, grounds: Grounds) -> ParameterComparison:
    """Returns the record of one parameter: equivalent up to `allowed`, divergent beyond what no rounding explains.

    Working precision never calls a fault: what it does not explain stays inconclusive until a control decides it.
    """
    if row.why is not None:
        return not_compared(row)
    allowed, fault = limits(row, grounds)
    outcome = Outcome.INCONCLUSIVE
    if row.difference <= allowed:
        outcome = Outcome.EQUIVALENT
    elif row.difference > fault:
        outcome = Outcome.DIVERGENT
    working = grounds.working if grounds.method == Method.FLOAT64_CONTROL else row.difference
    return record(row, outcome, grounds.method, allowed, working)


def limits(row: Difference, grounds: Grounds) -> tuple[float, float]:
    """Returns the largest difference that rounding explains, and the one above which it is a fault.

        working precision   16 u of the norms; 16 u · Σ|terms| where that tells     no difference is a fault yet
        two samples         the same; 8 times their rounding, 1e-5 of the reference at most              nor here
        float64 control     max(16 u64, 4 u32) · scale, sqrt(u64 / u) · Δ, 32 floor64         the same
        noise floor         16 u · scale, 32 floors (4 where u is coarse)                     320 floors (16)

    The control's third term is the geometric middle between a difference that shrank like the roundoff and one that did
    not shrink. In float64 4 u32 of the scale are always allowed by a control or a floor: a cast to float32 inside a
    kernel hides from both.
    """
    if grounds.method in (Method.WORKING_PRECISION, Method.TWO_SAMPLES):
        floor = grounds.floor or 0.0
        return _allowed_rounding(row.scale, row.reference, grounds.unit, grounds.terms, floor, grounds.zero), math.inf
    scale = max(row.scale, grounds.terms)
    smallest = FEW_UNITS * grounds.unit * scale
    # A kernel that casts to float32 inside rounds in both strategies, and neither control nor floor sees it.
    if grounds.unit <= U64:
        smallest = max(smallest, CAPPED_UNITS * U32 * scale)
    # In coarse arithmetic a moved weight moves the gradient by more than rounding does: fewer floors are allowed.
    equivalent, divergent = COARSE_FLOORS if grounds.unit > COARSE else FINE_FLOORS
    floor = grounds.floor if grounds.floor is not None else 0.0
    allowed = max(smallest, equivalent * floor)
    # Between the two limits a floor decides nothing: it is a sample of three.
    if grounds.method == Method.NOISE_FLOOR:
        return allowed, max(smallest, divergent * floor)
    if grounds.working_unit > grounds.unit and math.isfinite(grounds.working):
        allowed = max(allowed, math.sqrt(grounds.unit / grounds.working_unit) * grounds.working)
    return allowed, allowed


def _allowed_rounding(
    scale: float, reference: float, unit: float, terms: float, floor: float = 0.0, zero: bool = False
) -> float:
    """Returns the rounding to expect without a control: a few u of the norms, and more only where it hides no fault.

    Σ|terms| and a floor may be far larger than the gradient. Σ|terms| counts if it allows at most 1e-5 of the gradient,
    or if the gradient itself is no more than the rounding of its terms. A floor counts up to 1e-5, or where
    the gradient is zero but for rounding.
    """
    allowed = FEW_UNITS * unit * scale
    by_terms, by_floor = FEW_UNITS * unit * terms, min(FEW_TIMES * floor, math.inf if zero else FINE * reference)
    # Terms may cancel: then Σ|terms| is far above the gradient, and a fault of its size would hide in what it allows.
    if by_terms > allowed and (by_terms <= FINE * reference or scale <= by_terms):
        allowed = by_terms
    return max(allowed, by_floor)


def decide_at_once(rows: Iterable[Difference], unit: float, terms: Mapping[str, float]) -> list[ParameterComparison]:
    """Decides all rows in working precision, as `decide` does, in a microsecond each where they agree.

    Args:
        rows: The measured differences.
        unit: Unit roundoff u of the working precision.
        terms: Σ|terms| by parameter name, where they were seen.
    """
    decided = []
    agree, method = Outcome.EQUIVALENT, Method.WORKING_PRECISION
    for row in rows:
        name, shape, reference, accumulated, difference, worst, why = row
        # `max` and properties would cost more than all the rest: models have thousands of parameters.
        scale = reference if reference > accumulated else accumulated
        allowed = _allowed_rounding(scale, reference, unit, terms.get(name, 0.0))
        if why is None and difference <= allowed:
            fields = (name, shape, agree, method, reference, accumulated, difference, allowed, difference, worst, None)
            decided.append(tuple.__new__(ParameterComparison, fields))  # as its own `__new__`, which is Python
        else:
            decided.append(decide(row, Grounds(Method.WORKING_PRECISION, unit, terms.get(name, 0.0))))
    return decided


def fine(row: Difference) -> bool:
    """Whether a difference is so small that rounding of two samples may explain it."""
    return row.difference <= FINE * row.reference


def floors_allowed(unit: float) -> float:
    """Returns how many noise floors a difference may be in arithmetic with this unit roundoff."""
    return (COARSE_FLOORS if unit > COARSE else FINE_FLOORS)[0]


def not_compared(row: Difference) -> ParameterComparison:
    """Returns the record of a parameter that has no finite gradient on both sides."""
    outcome = Outcome.DIVERGENT
    # A parameter that no strategy reaches has no gradient in either: that is the same result, and trains the same.
    if row.why is NotCompared.UNUSED:
        outcome = Outcome.EQUIVALENT
    elif row.why is NotCompared.NOT_FINITE_IN_BOTH:  # NaN on both sides is neither the same nor a difference
        outcome = Outcome.INCONCLUSIVE
    return record(row, outcome, Method.NOT_COMPARED, math.nan, row.difference)


def record(row: Difference, outcome: Outcome, method: Method, allowed: float, working: float) -> ParameterComparison:
    """Returns the record of a measured difference and what was decided about it."""
    return ParameterComparison(
        row.name,
        row.shape,
        outcome,
        method,
        row.reference,
        row.accumulated,
        row.difference,
        allowed,
        working,
        row.worst,
        row.why,
    )


def floors_wanted(rows: Sequence[ParameterComparison]) -> bool:
    """Whether what diverges in float64 may be the rounding of a zero gradient, so that only its floor can tell."""
    zero = zero_in_float64(row.reference_norm for row in rows)
    return any(
        row.outcome is Outcome.DIVERGENT and max(row.reference_norm, row.accumulated_norm) <= zero for row in rows
    )


def zero_in_float64(norms: Iterable[float]) -> float:
    """Returns the norm up to which a gradient may be nothing but float64's rounding, given those of all parameters.

    One whose terms cancel leaves the roundoff of terms that nobody saw. Suspected up to the geometric middle between
    the largest gradient of all and that one's roundoff.
    """
    return math.sqrt(U64) * max(filter(math.isfinite, norms), default=0.0)
