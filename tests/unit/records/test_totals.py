"""What rows say together."""

from __future__ import annotations

import math

import pytest

from gaverify import Outcome
from gaverify.records.comparison import Method, ParameterComparison
from gaverify.records.totals import outcome_of, relative_total, resolution_of, together

SAME, FAULT, OPEN = Outcome.EQUIVALENT, Outcome.DIVERGENT, Outcome.INCONCLUSIVE


def row(outcome: Outcome, reference: float = 1.0, allowed: float = 1e-6, method: str = "working-precision"):  # type: ignore[no-untyped-def]
    return ParameterComparison(
        "w",
        (1,),
        outcome,
        method,
        reference,
        reference,
        0.0,
        allowed,
        0.0,
        None,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [((), OPEN), ((SAME,), SAME), ((SAME, OPEN), OPEN), ((SAME, OPEN, FAULT), FAULT), ((SAME, FAULT), FAULT)],
)
def test_several_outcomes_together(outcomes: tuple[Outcome, ...], expected: Outcome) -> None:
    assert together(outcomes) is expected
    assert outcome_of([row(outcome) for outcome in outcomes]) is expected


def test_gradients_of_zero_agree_whatever_accumulation_does() -> None:
    assert outcome_of([row(SAME, 0.0)]) is OPEN
    assert outcome_of([row(SAME, math.nan)]) is OPEN, "unused parameters alone"
    assert outcome_of([row(SAME, 0.0), row(SAME)]) is SAME
    assert outcome_of([row(FAULT, math.nan)]) is FAULT, "a gradient on one side only"


@pytest.mark.parametrize(("allowed", "expected"), [(0.09, SAME), (0.11, OPEN)])
def test_what_rounding_may_hide_is_no_agreement(allowed: float, expected: Outcome) -> None:
    small = row(SAME, 0.01, allowed=0.01)
    assert outcome_of([row(SAME, allowed=allowed), small]) is expected
    few = row(SAME, allowed=allowed, method=Method.FEW_SAMPLES)
    assert outcome_of([few, few._replace(reference_norm=0.0)]) is expected, "decided together: of the whole, once"
    assert outcome_of([row(FAULT, allowed=allowed)]) is FAULT
    assert outcome_of([row(SAME, allowed=allowed, method=Method.TOLERANCE)]) is SAME, "as it was asked for"


def test_relative_total() -> None:
    assert relative_total([(3.0, 30.0), (4.0, 40.0)]) == pytest.approx(0.1)
    assert relative_total([(0.0, 0.0)]) == relative_total([]) == 0.0
    assert relative_total([(1e-30, 0.0)]) == math.inf
    assert relative_total([(math.nan, math.nan), (1.0, 2.0)]) == 0.5
    assert relative_total([(1e-200, 1e-200)]) == 1.0, "squares of these would be zero"


def test_resolution_counts_no_gradient_that_is_rounding() -> None:
    assert resolution_of([row(SAME), row(SAME, 1e-8)]) == pytest.approx(1e-6)
    assert resolution_of([row(SAME), row(SAME, 2e-6)]) == pytest.approx(0.5), "above rounding, and hardly seen"
    assert math.isnan(resolution_of([row(SAME, 0.0, 0.0)]))
    asked = row(SAME, 1e-8, method="tolerance")
    assert resolution_of([asked]) == pytest.approx(100.0), "tolerances that were asked for hide what they hide"
