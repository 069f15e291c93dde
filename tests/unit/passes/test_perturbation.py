"""Weights move by what is written, each its own way, and come back bit for bit."""

from __future__ import annotations

import pytest
import torch

from gaverify.passes.perturbation import moved, rounding_share
from gaverify.passes.precision import unit_roundoff

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_moves_by_one_or_two_units_in_its_last_place(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype))
    real = torch.view_as_real(weight.data) if dtype.is_complex else weight.data
    before = real.clone()
    share = rounding_share(weight, 0.0)
    assert share == 2 * unit_roundoff(dtype)
    with moved([weight], [share]):
        distance = ((real - before).double() / before.double()).abs()
        part = before != 0
        assert bool((distance[part] > 0).all()), "each of them moves"
        assert float(distance[part].max()) <= 2.1 * share
        assert 0.4 < float((real > before)[part].double().mean()) < 0.6, "up or down by a coin"
    assert torch.equal(real, before)


def test_coarser_arithmetic_than_the_weights_own_counts() -> None:
    assert rounding_share(torch.zeros(1), 2.0**-8) == 2 * 2.0**-8
    assert rounding_share(torch.zeros(1, dtype=torch.bfloat16), 2.0**-24) == 2 * 2.0**-8


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_a_share_is_that_share(share: float) -> None:
    weight = torch.nn.Parameter(torch.arange(1.0, 65.0))
    before = weight.detach().clone()
    with moved([weight], [share]):
        torch.testing.assert_close((weight.detach() - before).abs(), share * before)
    assert torch.equal(weight.detach(), before)


def test_seeds_move_differently_and_one_seed_alike() -> None:
    weight = torch.nn.Parameter(torch.ones(64))
    seen = []
    for seed in (0, 0, 1):
        with moved([weight], [0.5], seed):
            seen.append(weight.detach().clone())
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_weights_come_back_after_an_error() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="stop"), moved([weight], [1.0]):
        raise RuntimeError("stop")
    assert torch.equal(weight.detach(), torch.ones(3))
