"""Whether a module scales its channels; by slopes that really differ, not by what rounding makes of equal ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gaverify
from gaverify.causes.trace.normalisation import per_channel_affine


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("slopes", "normalises"),
    [((0.5, 1.0, 2.0), True), ((1.0, 1.0, 1.0), False), ((0.3, 0.3, 0.3), False), ((1.0, 1.0, 1.01), True)],
)
def test_slopes_of_the_channels(dtype: torch.dtype, slopes: tuple[float, ...], normalises: bool) -> None:
    for seed in range(20):  # rounding differs from draw to draw
        generator = torch.Generator().manual_seed(seed)
        before = torch.randn(16, 3, generator=generator, dtype=dtype)
        shift = torch.randn(3, generator=generator, dtype=dtype)
        after = (before - shift) / 7 * 7 * torch.tensor(slopes, dtype=dtype) + shift
        assert per_channel_affine(before, after) is normalises


def test_other_functions_of_the_input() -> None:
    before = torch.randn(16, 3)
    assert not per_channel_affine(before, before.square())
    assert not per_channel_affine(before, before[:8])


def by_hand(h: torch.Tensor) -> torch.Tensor:
    mean = h.mean(0)
    return (h - mean) / ((h - mean) ** 2).mean(0).add(1e-5).sqrt()


def mixed(h: torch.Tensor) -> torch.Tensor:
    """Switchable normalisation: statistics of the batch and of the sample, averaged."""
    mean = (h.mean(0) + h.mean(1, keepdim=True)) / 2
    return (h - mean) / (h.var(0) + h.var(1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("mix", "code"),
    [
        (by_hand, "GAV101"),
        (mixed, "GAV101"),
        (lambda h: h * torch.sigmoid(h.mean(0)), "GAV102"),
        (lambda h: h - h.mean(0), "GAV102"),
        (lambda h: h + 0.5 * h.mean(0), "GAV102"),
        (lambda h: h / h.sum(0), "GAV102"),
        (lambda h: torch.softmax(h, 0), "GAV102"),
        (lambda h: h + torch.mean(input=h, dim=0), "GAV102"),
    ],
)
def test_a_norm_is_one_wherever_it_is_written(mix: Callable[[torch.Tensor], torch.Tensor], code: str) -> None:
    class Net(torch.nn.Module):
        """Written in the forward of the model itself, between layers of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(mix(self.first(x))))

    torch.manual_seed(0)
    batch = torch.randn(16, 6), torch.randint(4, (16,))
    before = Net()
    kept = {name: value.clone() for name, value in before.state_dict().items()}
    verdict = gaverify.verify(before, lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]), batch, steps=4)
    assert [(finding.code, finding.proven) for finding in verdict.findings if finding.severity == "fault"] == [
        (code, True)
    ]
    assert all(torch.equal(value, kept[name]) for name, value in before.state_dict().items())
