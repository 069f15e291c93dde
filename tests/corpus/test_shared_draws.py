"""A draw without a sample dimension is shared by all micro-batches here and made K times in training: a note says so.

Established by hand, without gaverify: `x · r` with one r per forward gives the full batch one r and a window K of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from problems import fault_codes, story
from torch import nn

import gaverify
from gaverify import Outcome

STEPS = 4


class Scaled(nn.Module):
    """A linear layer whose output is multiplied by what `draw` returns for it."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor | float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x * self.draw(x)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def verdict_of(draw: Callable[[torch.Tensor], torch.Tensor | float]) -> gaverify.Verdict:
    torch.manual_seed(0)
    return gaverify.verify(Scaled(draw), loss, torch.randn(8, 4), steps=STEPS)


def shared(verdict: gaverify.Verdict) -> list[gaverify.Finding]:
    return [finding for finding in verdict.findings if "one value for the whole batch" in finding.summary]


def scalar(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(())  # here: scalar


def layer_drop(x: torch.Tensor) -> float:
    return 0.0 if torch.rand([]) < 0.1 else 1.0  # here: layer_drop


def by_python(x: torch.Tensor) -> float:
    return random.random()  # here: by_python


def by_numpy(x: torch.Tensor) -> float:
    return float(numpy.random.rand())  # here: by_numpy


def of_a_channel(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape[1])  # here: of_a_channel


@pytest.mark.parametrize("draw", [scalar, layer_drop, by_python, by_numpy, of_a_channel])
def test_a_draw_for_the_whole_batch_is_named_with_its_line(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    verdict = verdict_of(draw)
    assert verdict.outcome is Outcome.EQUIVALENT and not fault_codes(verdict), story(verdict)
    (finding,) = shared(verdict)
    assert (finding.code, finding.severity) == ("GAV301", "note")
    assert finding.location is not None and finding.location.line == draw.__code__.co_firstlineno + 1
    assert f"draws {STEPS} of them" in finding.evidence[0].statement


def per_sample(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(len(x), 1)


def per_sample_by_python(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[random.random()] for _ in x])


def per_sample_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numpy.random.rand(len(x), 1), dtype=x.dtype)


@pytest.mark.parametrize("draw", [per_sample, per_sample_by_python, per_sample_by_numpy])
def test_draws_with_a_row_per_sample_are_dealt_and_not_shared(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    verdict = verdict_of(draw)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    assert not shared(verdict), story(verdict)
    assert any(finding.code == "GAV301" for finding in verdict.findings), story(verdict)


def test_no_draw_no_note() -> None:
    assert not verdict_of(lambda x: 1.0).findings


def test_one_micro_batch_shares_nothing() -> None:
    torch.manual_seed(0)
    assert not shared(gaverify.verify(Scaled(scalar), loss, torch.randn(8, 4), steps=1))


def test_by_hand_a_window_of_such_draws_is_another_estimate() -> None:
    """One generator state, and the window is far from the full batch: its K draws are others than the one."""
    torch.manual_seed(0)
    model, batch = Scaled(scalar).double(), torch.randn(8, 4, dtype=torch.float64)

    def gradient(parts: list[torch.Tensor]) -> torch.Tensor:
        model.zero_grad()
        for part in parts:
            (loss(model, part) / len(parts)).backward()
        return model.linear.weight.grad.clone()

    torch.manual_seed(1)
    whole = gradient([batch])
    torch.manual_seed(1)
    window = gradient(list(batch.chunk(STEPS)))
    assert float((window - whole).norm() / whole.norm()) > 0.05
