"""Faults of 6e-5, 1e-5 and 3e-6 are seen wherever rounding lies in a model; the healthy twins are equivalent."""

from __future__ import annotations

import problems_small
import pytest
from problems import story
from problems_small import FAMILIES, KINDS

import gaverify
from gaverify import Outcome

SIZES = (6e-5, pytest.param(1e-5, marks=pytest.mark.slow), 3e-6)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_fault_is_seen(family: str, kind: str, size: float, seed: int) -> None:
    problem, options, planted = problems_small.planted(family, kind, size, seed)
    assert size / 6 < planted <= 1.01 * size, "what was planted, by hand in float64"
    verdict = gaverify.verify(problem, diagnose=False, **options)
    assert verdict.outcome is Outcome.DIVERGENT, story(verdict)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_fault_nothing_is_seen(family: str, seed: int) -> None:
    problem, options, planted = problems_small.planted(family, "weight", 0.0, seed)
    assert planted < 1e-12
    verdict = gaverify.verify(problem, diagnose=False, **options)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
