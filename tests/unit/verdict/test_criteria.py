"""The one decision, with hand-made rows: each explanation of a difference reaches as far as it says, and no further."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest

from gaverify import Outcome
from gaverify.records.comparison import Method, NotCompared
from gaverify.thresholds import U32, U64
from gaverify.verdict.criteria import (
    Difference,
    Grounds,
    decide,
    decide_at_once,
    floors_allowed,
    floors_wanted,
)

U16 = 2.0**-8  # of bfloat16
SIZES = (0.0, 1e-12, 1e-8, 9e-7, 1e-6, 1e-5, 1.0)
SAME, FAULT, OPEN = Outcome.EQUIVALENT, Outcome.DIVERGENT, Outcome.INCONCLUSIVE


def row(
    difference: float, reference: float = 1.0, accumulated: float | None = None, missing: NotCompared | None = None
) -> Difference:
    return Difference(
        "w", (2,), reference, reference if accumulated is None else accumulated, difference, None, missing
    )


@pytest.mark.parametrize(
    ("why", "reached", "grounds", "beyond"),
    [
        ("working precision: 16 u of the norm", 16 * U32, Grounds(Method.WORKING_PRECISION, U32), OPEN),
        ("bfloat16: 16 of its own u", 16 * U16, Grounds(Method.WORKING_PRECISION, U16), OPEN),
        ("Σ|terms| of a sum", 16 * U32 * 10, Grounds(Method.WORKING_PRECISION, U32, terms=10.0), OPEN),
        ("terms that allow more than 1e-5", 16 * U32, Grounds(Method.WORKING_PRECISION, U32, terms=11.0), OPEN),
        ("8 times the rounding of two samples", 8e-6, Grounds(Method.TWO_SAMPLES, U32, floor=1e-6), OPEN),
        ("rounding of more than 1e-5", 9.9e-6, Grounds(Method.TWO_SAMPLES, U32, floor=3e-6), OPEN),
        ("two samples without this gradient", 16 * U32, Grounds(Method.TWO_SAMPLES, U32), OPEN),
        ("terms smaller than the norm say nothing", 16 * U32, Grounds(Method.WORKING_PRECISION, U32, terms=0.5), OPEN),
        ("float64: 4 u32, for casts that hide", 4 * U32, Grounds(Method.FLOAT64_CONTROL, U64), FAULT),
        ("float64: of the terms", 4 * U32 * 9, Grounds(Method.FLOAT64_CONTROL, U64, terms=9.0), FAULT),
        (
            "float64: shrunk from 0.5 by half of the orders of magnitude",
            math.sqrt(U64 / U32) * 0.5,
            Grounds(Method.FLOAT64_CONTROL, U64, working=0.5, working_unit=U32),
            FAULT,
        ),
        (
            "float64: what was NaN in working precision did not shrink",
            4 * U32,
            Grounds(Method.FLOAT64_CONTROL, U64, working=math.nan, working_unit=U32),
            FAULT,
        ),
        ("float64: 32 of its floors", 32e-6, Grounds(Method.FLOAT64_CONTROL, U64, floor=1e-6), FAULT),
        ("float32 by the floor: 32 floors", 32e-5, Grounds(Method.NOISE_FLOOR, U32, floor=1e-5), OPEN),
        ("a floor of zero allows 16 u still", 16 * U32, Grounds(Method.NOISE_FLOOR, U32, floor=0.0), FAULT),
        ("bfloat16 by the floor: 4 floors", 0.4, Grounds(Method.NOISE_FLOOR, U16, floor=0.1), OPEN),
        ("a float64 model by the floor: 4 u32", 4 * U32, Grounds(Method.NOISE_FLOOR, U64, floor=0.0), FAULT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_explanation_reaches_so_far(why: str, reached: float, grounds: Grounds, beyond: Outcome) -> None:
    within, above = decide(row(reached), grounds), decide(row(reached * (1 + 1e-9)), grounds)
    assert (within.outcome, above.outcome) == (SAME, beyond), why
    assert within.allowed == above.allowed == pytest.approx(reached)
    assert within.method == grounds.method


@pytest.mark.parametrize(("unit", "floor", "fault"), [(U32, 1e-5, 320e-5), (U16, 0.1, 1.6)])
def test_between_the_thresholds_of_the_floor_nothing_is_claimed(unit: float, floor: float, fault: float) -> None:
    grounds = Grounds(Method.NOISE_FLOOR, unit, floor=floor)
    assert decide(row(floors_allowed(unit) * floor * 1.01), grounds).outcome is OPEN
    assert decide(row(fault), grounds).outcome is OPEN
    assert decide(row(fault * 1.001), grounds).outcome is FAULT


def test_the_smallest_fault_on_record_stays_a_fault_in_float64() -> None:
    grounds = Grounds(Method.FLOAT64_CONTROL, U64, working=6e-5, working_unit=U32, floor=1e-16)
    assert decide(row(6e-5), grounds).outcome is FAULT
    assert decide(row(3e-6), grounds._replace(working=3e-6)).outcome is FAULT


def test_scale_is_the_larger_norm() -> None:
    assert decide(row(16 * U32 * 5, 1.0, 5.0), Grounds(Method.WORKING_PRECISION, U32)).outcome is SAME
    assert decide(row(16 * U32 * 5, 5.0, 1.0), Grounds(Method.WORKING_PRECISION, U32)).outcome is SAME


@pytest.mark.parametrize(
    ("missing", "outcome"),
    [
        (NotCompared.UNUSED, SAME),
        (NotCompared.MISSING_IN_ACCUMULATED, FAULT),
        (NotCompared.NOT_FINITE_IN_FULL, FAULT),
        (NotCompared.NOT_FINITE_IN_BOTH, OPEN),
    ],
)
@pytest.mark.parametrize("method", [Method.WORKING_PRECISION, Method.FLOAT64_CONTROL, Method.NOISE_FLOOR])
def test_a_side_that_is_missing(missing: NotCompared, outcome: Outcome, method: Method) -> None:
    decided = decide(row(math.nan, math.nan, math.nan, missing), Grounds(method, U32, floor=1.0))
    assert (decided.outcome, decided.method) == (outcome, Method.NOT_COMPARED)


def test_a_gradient_that_is_the_rounding_of_its_terms_is_explained_by_them() -> None:
    grounds = Grounds(Method.WORKING_PRECISION, U32, terms=1.0)
    zero, small = decide(row(5e-7, 5e-7), grounds), decide(row(5e-7, 2e-6), grounds)
    assert zero.outcome is SAME and zero.vanishing
    assert small.outcome is OPEN, "a gradient above the rounding of its terms may hide a fault of 25 %"
    assert decide(row(5e-7, 5e-7), grounds._replace(terms=0.1)).outcome is OPEN, "more than its terms explain"


def test_a_floor_explains_no_gradient_that_is_no_larger_than_itself() -> None:
    assert decide(row(1e-6, 1e-6), Grounds(Method.TWO_SAMPLES, U32, floor=1e-6)).outcome is OPEN


def test_what_vanishes_is_relative_to_the_arithmetic_that_decided() -> None:
    rounding = decide(row(4e-8, 5e-8), Grounds(Method.WORKING_PRECISION, U32, terms=1.0))
    assert rounding.vanishing, "a sum of terms around 1 that cancels to 5e-8 is float32's rounding"
    small = decide(row(4e-15, 5e-8), Grounds(Method.WORKING_PRECISION, U32, terms=5e-8))
    assert not small.vanishing, "a loss multiplied by 1e-8 has small gradients that are no rounding"
    assert decide(row(0.0, 0.0), Grounds(Method.FLOAT64_CONTROL, U64)).vanishing
    assert not decide(
        row(math.nan, math.nan, 1.0, NotCompared.MISSING_IN_FULL), Grounds(Method.FLOAT64_CONTROL, U64)
    ).vanishing


def test_a_floor_is_wanted_for_a_tiny_gradient_that_diverges() -> None:
    grounds = Grounds(Method.FLOAT64_CONTROL, U64)
    large, tiny = decide(row(0.0, 1.0), grounds), decide(row(1e-17, 1e-17), grounds)
    assert tiny.outcome is FAULT
    assert floors_wanted([large, tiny])
    assert not floors_wanted([large, decide(row(1e-5, 1e-5), grounds)]), "far above what float64 rounds"
    assert not floors_wanted([large, decide(row(0.0, 1e-17), grounds)]), "nothing diverges"


def test_many_rows_are_decided_as_each_of_them() -> None:
    rows = [row(d, e)._replace(name=str(at)) for at, (d, e) in enumerate(itertools.product(SIZES, SIZES))]
    rows.append(row(math.nan, math.nan, math.nan, NotCompared.NOT_FINITE_IN_BOTH))
    terms = {str(at): SIZES[at % len(SIZES)] for at in range(0, len(rows), 2)}
    each = [decide(row, Grounds(Method.WORKING_PRECISION, U32, terms.get(row.name, 0.0))) for row in rows]
    together = decide_at_once(rows, U32, terms)
    assert list(map(repr, together)) == list(map(repr, each))
    assert {decided.outcome for decided in together} == {SAME, OPEN}


def test_criteria_need_no_torch() -> None:
    code = "import gaverify.verdict.criteria, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
