"""A kernel without float64 may return what the memory held: such a control decides nothing.

Shapes: B = 8 samples of six features.
"""

from __future__ import annotations

import pytest
import torch
from problems import fault_codes, story
from torch import nn

import gaverify
from gaverify import Outcome


class Kernel(nn.Module):
    """Gives numbers in float32, and none in float64."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.inner, self.broken = nn.Linear(6, 3, device="cpu"), broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).tanh()
        return y * float("nan") if self.broken and y.dtype is torch.float64 else y


@pytest.mark.parametrize("broken", [True, False])
def test_a_control_without_numbers_decides_nothing(broken: bool) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 6, device="cpu"), torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 1], device="cpu")

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, mask = batch
        return (model(values).square().mean(1) * mask).sum() / mask.sum()

    verdict = gaverify.verify(Kernel(broken), loss, batch, steps=4)
    assert verdict.outcome is Outcome.DIVERGENT and fault_codes(verdict) == {"GAV202"}, story(verdict)
    assert not any(finding.code == "GAV503" for finding in verdict.findings), story(verdict)
    assert ("some kernel has no float64" in verdict.control_failure) is broken
