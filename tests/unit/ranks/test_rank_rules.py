"""The rules about ranks, on hand-made numbers: each fires on its own signature and stays quiet on its neighbours'."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured import record
from ranked import GATHERED, fit, ranks

from gaverify.rules import gather_without_gradient, mean_over_ranks, wrong_rank_scale
from gaverify.rules.scale import meaning_in_loop
from gaverify.rules.wording import shares

RULES = (mean_over_ranks, wrong_rank_scale, gather_without_gradient)
CASES = {
    "unequal shares": (ranks(fit((0.534, 0.466)), weights_control=3e-7), {"GAV703"}),
    "factor R": (ranks(fit((0.25, 0.25), factor=2.0, left=2e-7), weights_control=2e-7), {"GAV704"}),
    "factor 1/R": (ranks(fit((1.0, 1.0), factor=0.5, left=2e-7), weights_control=2e-7), {"GAV704"}),
    "gather": (ranks(fit(residual=0.15), own=GATHERED, gather_control=1.2e-7), {"GAV705"}),
    "gather that is not the cause": (ranks(fit(residual=0.15), own=GATHERED, gather_control=0.4), set()),
    "no weights fit and nothing is gathered": (ranks(fit(residual=0.15)), set()),
    "a weight below zero is no share": (ranks(fit((1.4, -0.4))), set()),
    "one process diverges alike": (ranks(fit((0.534, 0.466)), from_one_process=1e-7), set()),
    "no difference": (ranks(fit((0.534, 0.466)), divergent=False), set()),
    "nothing to fit": (ranks(None), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_each_signature_has_its_rule(name: str) -> None:
    measured, codes = CASES[name]
    found = [finding for rule in RULES for finding in rule.judge(replace(record(), ranks=measured))]
    assert {finding.code for finding in found} == codes
    assert all(finding.proven for finding in found)


def test_a_gather_that_explains_most_is_not_proven() -> None:
    measured = ranks(fit(residual=0.15), own=GATHERED, gather_control=1e-3)
    (finding,) = gather_without_gradient.judge(replace(record(), ranks=measured))
    assert not finding.proven and "tested" not in finding.remedy


def test_a_run_without_ranks_has_no_such_finding() -> None:
    assert not [finding for rule in RULES for finding in rule.judge(record())]


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ((0.5338, 0.4662), "0.534, 0.466"),
        ((1.0, -1.12e-09), "1, 0"),
        ((3e-7, 1.5, -0.0), "0, 1.5, 0"),
        ((1e-3, 1.0), "0.001, 1"),
        ((2e-9, 1e-9), "2e-09, 1e-09"),
        ((0.0, 0.0), "0, 0"),
        ((), ""),
    ],
)
def test_a_weight_that_is_rounding_of_zero_is_shown_as_zero(weights: tuple[float, ...], text: str) -> None:
    assert shares(weights) == text


@pytest.mark.parametrize(
    ("factor", "steps", "ranks", "text"),
    [
        (4.0, 4, 1, " = K: the loss is not divided by K"),
        (4.0, 4, 2, " = K: the loss is not divided by K"),
        (2.0, 2, 2, " = K = R: the loss is not divided by K, or a sum over the ranks where their mean was meant"),
        (0.25, 4, 2, " = 1/K: the loss is divided by K although it needs no division, or twice"),
        (3.0, 4, 2, ""),
    ],
)
def test_readings_of_a_factor(factor: float, steps: int, ranks: int, text: str) -> None:
    assert meaning_in_loop(factor, steps, ranks, 1e-4) == text


def test_a_factor_below_one_has_both_readings_as_well() -> None:
    assert "1/K = 1/R" in meaning_in_loop(0.5, 2, 2, 1e-4)
