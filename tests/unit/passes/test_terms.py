"""Σ|terms| of every sum that a backward forms, against sums made by hand; freed memory is credited to nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gaverify.passes.modes import OperationMode
from gaverify.passes.terms import SUMMING, TermSums, _magnitudes

aten = torch.ops.aten


class Broadcast(nn.Module):
    """Adds a row to every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def summed(module: nn.Module, x: torch.Tensor) -> tuple[TermSums, torch.Tensor]:
    """The sums of one backward, and the gradient that reached the module's output."""
    sums = TermSums()

    def handle(func, args, kwargs):  # type: ignore[no-untyped-def]
        result = func(*args, **kwargs)
        if func in SUMMING:
            sums.note(func, args, result)
        return result

    output = module(x)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    with OperationMode(handle):
        output.backward(upstream)
    return sums, upstream


IMAGES, ROWS = (3, 4, 5, 6), (3, 7, 4)


@pytest.mark.parametrize(
    ("make", "shape", "over"),
    [
        (lambda: nn.Linear(4, 4), ROWS, (0, 1)),
        (Broadcast, (3, 4), (0,)),
        (lambda: nn.LayerNorm(4), ROWS, (0, 1)),
        (lambda: nn.LayerNorm((7, 4)), ROWS, (0,)),
        (lambda: nn.GroupNorm(2, 4), IMAGES, (0, 2, 3)),
        (lambda: nn.BatchNorm2d(4), IMAGES, (0, 2, 3)),
        (lambda: nn.Conv2d(4, 4, 3), IMAGES, (0, 2, 3)),
        (lambda: nn.Conv1d(7, 2, 1), ROWS, (0, 2)),
        (lambda: nn.ConvTranspose2d(4, 4, 3), IMAGES, (0, 2, 3)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_terms_of_a_bias(make: Callable[[], nn.Module], shape: tuple[int, ...], over: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = make()
    sums, upstream = summed(module, torch.randn(shape))
    found = sums.of(module.bias.grad)
    assert found is not None
    assert float(found.scale) == pytest.approx(float(upstream.abs().sum(over).norm()), rel=1e-5)
    assert sums.of(torch.zeros(4)) is None


def test_terms_of_an_embedding() -> None:
    table, looked_up = nn.Embedding(5, 3), torch.tensor([[0, 1, 1], [1, 4, 0]])
    sums, upstream = summed(table, looked_up)
    by_hand = torch.zeros(5, 3)
    for row, gradient in zip(looked_up.flatten(), upstream.flatten(0, 1), strict=True):
        by_hand[row] += gradient.abs()
    found = sums.of(table.weight.grad)
    assert found is not None and float(found.scale) == pytest.approx(float(by_hand.norm()))


def test_a_sum_of_sums_counts_the_outer_terms_alone_which_are_less() -> None:
    module = nn.InstanceNorm2d(4, affine=True)
    sums, upstream = summed(module, torch.randn(IMAGES))
    found = sums.of(module.bias.grad)
    assert found is not None
    assert float(found.scale) == pytest.approx(float(upstream.sum((2, 3)).abs().sum(0).norm()), rel=1e-5)


def test_weights_are_no_sums_that_are_known() -> None:
    module = nn.Linear(4, 4)
    sums, _ = summed(module, torch.randn(3, 4))
    assert sums.of(module.weight.grad) is None


def test_half_precision_does_not_overflow() -> None:
    found = _magnitudes(torch.full((70000, 2), 10.0, dtype=torch.float16), [0])
    assert torch.equal(found, torch.full((2,), 700000.0))


def test_slices_add_up() -> None:
    terms = torch.randn(3, 1 << 20, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(_magnitudes(terms, [1]), terms.abs().sum(1))
    torch.testing.assert_close(_magnitudes(terms, [0, 1]), terms.abs().sum())


def test_memory_that_was_freed_and_given_to_another_gradient_is_not_credited() -> None:
    sums = TermSums()
    terms = torch.randn(8, 4)
    total = terms.sum([0])
    sums.note(aten.sum.dim_IntList, (terms, [0]), total)
    assert sums.of(total) is not None
    assert sums.of(total.view(2, 2)) is not None, "a view lies in the same memory"
    address = total.data_ptr()
    del total
    for other in [torch.empty(4) for _ in range(100)]:
        if other.data_ptr() == address:
            assert sums.of(other) is None
