"""What any window of ranks is asked, on gradients made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from ranked import fit, ranks

from gaverify.passes.gradients import Gradients
from gaverify.ranks.facts import apart_by, fitted, own_sketch, with_shares
from gaverify.records.ranks import Shares

OWN = (torch.tensor([1.0, 3.0, 0.0]), torch.tensor([2.0, -1.0, 1.0]))


def gradients(first: float, second: float, beside: torch.Tensor | None = None) -> Gradients:
    return {"weight": first * OWN[0] + second * OWN[1], "bias": beside}


def test_the_weights_of_ranks_are_found() -> None:
    own = [own_sketch(gradients(1.0, 0.0)), own_sketch(gradients(0.0, 1.0))]
    found = fitted(own, gradients(0.7, 0.3), gradients(0.5, 0.5))
    assert found is not None and found.weights == pytest.approx((0.7, 0.3)) and found.used == pytest.approx((0.5, 0.5))
    assert fitted(own, gradients(0.7, 0.3, torch.ones(2)), gradients(0.5, 0.5)) is None, "the ranks lack one"
    assert fitted(own, gradients(0.0, 0.0), gradients(0.5, 0.5)) is None, "nothing to be fitted to"
    assert fitted(own, gradients(0.7, 0.3), gradients(math.nan, 0.5)) is None


def test_how_far_ranks_are_apart() -> None:
    one, two, nothing = (own_sketch(gradients(*weights)) for weights in ((1.0, 0.0), (1.5, 0.0), (0.0, 0.0)))
    assert apart_by([one, one, two]) == pytest.approx(0.5)
    assert apart_by([nothing, nothing]) == 0.0 and apart_by([nothing, one]) == math.inf


def test_the_first_share_that_leaves_rounding_is_the_last_that_is_tried() -> None:
    tried: list[Shares] = []

    def left(shares: Shares) -> float:
        tried.append(shares)
        return 1e-9

    targets = ((9, 3), (1, 3))
    found = with_shares(ranks(None, targets=targets), left)
    assert len(found.shares_of_targets) == 2 and tried == [found.shares_tried] and found.weights_control == 1e-9
    assert math.isnan(with_shares(ranks(fit(residual=0.5)), left).weights_control)
