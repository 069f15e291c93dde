"""The one fit of micro-batch weights, on gradients written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from gaverify.passes.weight_fit import SINGULAR_FLOAT64, fit_weights

EYE = torch.eye(6, 3, dtype=torch.float64)  # three micro-batches whose gradients are orthogonal unit vectors


def fit(columns: torch.Tensor, target: torch.Tensor, **options):  # type: ignore[no-untyped-def]
    return fit_weights(columns, target, singular=SINGULAR_FLOAT64, **options)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_right_weights_come_back_exactly() -> None:
    right = vector(0.1, 0.3, 0.6)
    found = fit(EYE, EYE @ right, weights=vector(1, 1, 1))
    assert found.weights == pytest.approx(right.tolist()) and found.residual < 1e-15 and found.determined
    assert found.multipliers == pytest.approx(right.tolist())
    assert not found.vacuous


def test_used_weights_are_fitted_where_only_their_gradient_is_known() -> None:
    found = fit(EYE, EYE @ vector(1, 1, 1), used=EYE @ vector(0.5, 1.0, 2.0))
    assert found.used == pytest.approx((0.5, 1.0, 2.0)) and found.used_residual < 1e-15
    assert found.multipliers == pytest.approx((2.0, 1.0, 0.5))


def test_a_forgotten_division_is_one_factor() -> None:
    found = fit(EYE, EYE @ vector(1 / 3, 1 / 3, 1 / 3), weights=vector(1, 1, 1))
    assert found.factor == pytest.approx(3.0) and found.factor_residual < 1e-15
    uneven = fit(EYE, EYE @ vector(0.1, 0.3, 0.6), weights=vector(1, 1, 1))
    assert uneven.factor_residual > 0.1


def test_what_no_weights_explain_is_the_residual() -> None:
    target = EYE @ vector(1, 1, 1) + torch.eye(6, dtype=torch.float64)[5] * 3.0
    found = fit(EYE, target, weights=vector(1, 1, 1))
    assert found.residual == pytest.approx(3.0 / math.sqrt(12.0))


def test_micro_batches_that_cannot_be_told_apart_keep_the_weights_that_were_used() -> None:
    columns = EYE[:, [0, 0, 1]]
    found = fit(columns, columns @ vector(0.5, 0.5, 1.0), weights=vector(0.2, 0.8, 1.0))
    assert not found.determined
    assert found.weights == pytest.approx((0.2, 0.8, 1.0)), "they fit already"


def test_as_many_weights_as_numbers_say_nothing() -> None:
    assert fit(EYE[:3], vector(1, 2, 3), weights=vector(1, 1, 1)).vacuous
    assert fit(EYE, EYE @ vector(1, 2, 3), weights=vector(1, 1, 1), equations=3).vacuous


def test_no_backward_pass_fits_nothing() -> None:
    found = fit(EYE[:, :0], vector(1, 0, 0, 0, 0, 0), used=vector(0, 0, 0, 0, 0, 0))
    assert found.weights == () and found.residual == 1.0 and not found.determined


def test_noise_is_the_spread_of_the_micro_batches() -> None:
    same = EYE[:, [0, 0, 0, 0]] / 4
    assert fit(same, same.sum(1), weights=vector(1, 1, 1, 1)).noise == 0.0
    spread = vector(1.0, 3.0)[None] * torch.ones(1, 2, dtype=torch.float64)  # shares 1 and 3 of a sum of 4
    assert fit(spread, vector(4.0), weights=vector(1, 1)).noise == pytest.approx(math.sqrt(2 * 2.0) / 4)


def test_nan_is_explained_by_no_weights() -> None:
    found = fit(EYE * math.nan, vector(1, 0, 0, 0, 0, 0), weights=vector(1, 1, 1))
    assert found.residual == math.inf and not found.determined
