"""Measuring: norms against float64 by hand, whatever the shape, and one transfer for all parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gaverify
from gaverify.verdict.comparison import measure

SHAPES = [(), (1,), (3, 5), (40, 40), (40000,), (300, 1000), (0,), (2, 0)]


def gradients(seed: int, dtype: torch.dtype, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [shape for shape in SHAPES for _ in range(count)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return {str(at): tensor for at, tensor in enumerate(drawn)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("count", [1, 9], ids=["by-segments", "stacked"])
def test_norms_against_float64_by_hand(dtype: torch.dtype, count: int) -> None:
    actual, expected = gradients(0, dtype, count), gradients(1, dtype, count)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for row in measure(actual, expected):
        a, e = actual[row.name].to(wide), expected[row.name].to(wide)
        for found, tensor in ((row.reference, e), (row.accumulated, a), (row.difference, a - e)):
            assert found == pytest.approx(float(tensor.abs().square().sum().sqrt()), rel=1e-5, abs=1e-12)
        if a.numel() and not dtype.is_complex:
            assert row.worst is not None
            assert float((a - e)[row.worst.index].abs()) == pytest.approx(float((a - e).abs().max()), rel=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("count", [1, 9], ids=["by-segments", "stacked"])
def test_squares_that_float32_cannot_hold(size: float, count: int) -> None:
    actual, expected = gradients(0, torch.float32, count), gradients(1, torch.float32, count)
    for side in (actual, expected):
        for name in side:
            side[name] *= size
    for row in measure(actual, expected):
        a, e = actual[row.name].double(), expected[row.name].double()
        for found, tensor in ((row.reference, e), (row.accumulated, a), (row.difference, a - e)):
            assert found == pytest.approx(float(tensor.norm()), rel=1e-5, abs=0)


def test_the_worst_element_is_looked_for_where_it_may_matter() -> None:
    expected = {"fault": torch.ones(5, 40), "rounding": torch.ones(5, 40), "same": torch.ones(5, 40)}
    actual = {name: gradient.clone() for name, gradient in expected.items()}
    actual["fault"][3, 7] = 2.0
    actual["rounding"][4, 1] += 2.0**-23
    rows = {row.name: row for row in measure(actual, expected)}
    assert rows["fault"].worst == ((3, 7), 1.0, 2.0)
    assert rows["rounding"].worst is None and rows["rounding"].difference > 0
    located = {row.name: row for row in measure(actual, expected, located=True)}
    assert located["rounding"].worst is not None and located["rounding"].worst.index == (4, 1)
    assert located["same"].worst is None


def test_the_worst_element_of_a_large_gradient_lies_in_any_slice() -> None:
    expected = torch.zeros(3, 1 << 18)
    actual = expected.clone()
    actual[2, 12345] = -3.0
    (row,) = measure({"w": actual}, {"w": expected})
    assert row.worst == ((2, 12345), 0.0, -3.0)


def test_missing_and_infinite_sides() -> None:
    one, bad = torch.ones(2), torch.tensor([1.0, math.inf])
    actual = {"both": None, "lost": None, "gained": one, "nan": bad, "nan-both": bad, "fine": one}
    expected = {"both": None, "lost": one, "gained": None, "nan": one, "nan-both": bad, "fine": one}
    rows = {row.name: row for row in measure(actual, expected)}
    assert all(math.isnan(row.difference) and row.why for name, row in rows.items() if name != "fine")
    assert rows["fine"].difference == 0.0 and rows["fine"].why is None


class Fetches(TorchDispatchMode):
    """Counts the numbers that are fetched one by one, each a synchronisation on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def fetched(layers: int) -> int:
    torch.manual_seed(0)
    model, targets = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), torch.randn(8, 4)
    problem = (torch.randn(8, 4), targets)
    with Fetches() as seen:
        verdict = gaverify.verify(model, lambda m, b: (m(b[0]) - b[1]).square().mean(), problem, steps=2)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT and verdict.method == "working-precision"
    assert any(row.allowed > 1.01 * 16 * 2.0**-24 * row.reference_norm for row in verdict.parameters), "terms are known"
    return seen.count


def test_a_verdict_fetches_no_number_per_parameter() -> None:
    assert fetched(24) == fetched(3)


def test_fetches_could_be_seen() -> None:
    with Fetches() as seen:
        float(torch.ones(()))
    assert seen.count == 1
