"""What the weights that fit decide of an update below float32, on rows made by hand.

Norms: the whole full-batch gradient is 1, u = 2⁻⁸.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gaverify.audit.stages import Rows, decided_by_weights
from gaverify.records.comparison import Method, NotCompared, Outcome, ParameterComparison
from gaverify.records.totals import resolution_of
from gaverify.records.weights import WeightFit

U = 2.0**-8


def row(name: str, reference: float, difference: float, why: NotCompared | None = None) -> ParameterComparison:
    floor = Outcome.INCONCLUSIVE  # what the noise floor made of it
    return ParameterComparison(
        name, (4,), floor, Method.NOISE_FLOOR, reference, reference, difference, 0.9, difference, None, why
    )


def rows(apart: float) -> Rows:
    """Two parameters, the second a tenth as large and as far apart as the first is long."""
    scale = 1 / math.hypot(1, 0.1)
    return Rows((row("large", scale, apart * scale), row("small", 0.1 * scale, 0.1 * apart * scale)), 0.6)


def fit(residual: float) -> WeightFit:
    return WeightFit((0.25,) * 4, residual, determined=True, used=(0.25,) * 4)


def outcomes(found: Rows) -> set[Outcome]:
    return {row.outcome for row in found.parameters}


@pytest.mark.parametrize("apart, rest", [(7.9 * U, 7.0 * U), (4 * U, 3.5 * U), (1.9 * U, 0.1 * U), (0.0, 0.0)])
def test_a_rest_that_no_weights_explain_is_rounding(apart: float, rest: float) -> None:
    found = decided_by_weights(rows(apart), fit(rest), U)
    assert outcomes(found) == {Outcome.EQUIVALENT}
    assert {row.method for row in found.parameters} == {Method.WEIGHTS}
    assert found.noise == rest
    assert resolution_of(found.parameters) == pytest.approx(8 * U)


@pytest.mark.parametrize("apart, rest", [(0.25, 0.02), (3.0, 0.02), (8.2 * U, 2 * U)])
def test_what_other_weights_explain_is_a_fault(apart: float, rest: float) -> None:
    found = decided_by_weights(rows(apart), fit(rest), U)
    assert outcomes(found) == {Outcome.DIVERGENT}
    assert found.noise == rest


def test_a_parameter_that_differs_by_no_more_than_the_rest_stays_open() -> None:
    """Its own difference may be rounding; that the weights are wrong shows in the others."""
    made = rows(0.25)
    within = replace(made, parameters=(made.parameters[0], made.parameters[1]._replace(difference_norm=0.001)))
    found = decided_by_weights(within, fit(0.02), U)
    assert [row.outcome for row in found.parameters] == [Outcome.DIVERGENT, Outcome.INCONCLUSIVE]


@pytest.mark.parametrize(
    "apart, rest",
    [
        (7.9 * U, 1.0 * U),  # within rounding, and other weights explain most of it
        (0.25, 8.5 * U),  # more rest than rounding leaves: structure, or a net that rounds more
        (0.058, 0.031),  # more than rounding, of which weights explain seven tenths
        (0.9, 0.9),
    ],
)
def test_what_the_weights_do_not_tell_is_left_to_the_noise_floor(apart: float, rest: float) -> None:
    made = rows(apart)
    assert decided_by_weights(made, fit(rest), U) is made


def test_float32_is_left_to_the_noise_floor() -> None:
    made = rows(1e-8)
    assert decided_by_weights(made, fit(1e-8), 2.0**-24) is made


def test_no_fit_or_one_with_as_many_weights_as_numbers_decides_nothing() -> None:
    made = rows(0.25)
    assert decided_by_weights(made, None, U) is made
    assert decided_by_weights(made, replace(fit(0.02), vacuous=True), U) is made


@pytest.mark.parametrize("why", [NotCompared.MISSING_IN_ACCUMULATED, NotCompared.NOT_FINITE_IN_ACCUMULATED])
def test_a_gradient_that_is_not_there_or_no_number_is_no_question_of_weights(why: NotCompared) -> None:
    spoilt = row("spoilt", math.nan if why.missing else 0.5, math.nan, why)
    made = Rows((*rows(0.01).parameters, spoilt), 0.6)
    assert decided_by_weights(made, fit(0.01), U) is made


def test_a_gradient_of_zeros_is_left_as_it_is() -> None:
    made = Rows((row("zero", 0.0, 0.0),), 0.0)
    assert decided_by_weights(made, fit(0.0), U) is made
