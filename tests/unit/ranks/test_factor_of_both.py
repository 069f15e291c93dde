"""A factor that is K and R at once cannot be told apart, and both readings are told."""

from __future__ import annotations

import pytest

from gaverify.rules.scale import meaning_in_loop


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
