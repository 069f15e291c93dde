"""A loss that is not finite names the first thing that is not: parameter, buffer, input or operation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gaverify
from gaverify import ProblemError


def message(model: nn.Module, loss, batch=None, **options) -> str:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    with pytest.raises(ProblemError) as raised:
        gaverify.verify(model, loss, torch.randn(8, 4) if batch is None else batch, **options)
    return str(raised.value)


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def test_a_parameter_that_was_never_initialised() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    assert "parameter `1.weight` is not finite" in message(model, squared)


def test_a_buffer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_mean[0] = math.nan
    assert "buffer `1.running_mean` is not finite" in message(model, squared, mode="eval")


def test_a_control_that_reads_it_alone_is_no_fault_of_gaverify() -> None:
    """In training BatchNorm does not read its statistics; the control that freezes it does, and finds NaN."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].running_mean[0] = math.nan
    torch.manual_seed(0)
    verdict = gaverify.verify(model, squared, torch.randn(8, 4))
    assert verdict.outcome is gaverify.Outcome.DIVERGENT
    assert "GAV101" in {finding.code for finding in verdict.findings}


def test_an_input() -> None:
    assert "the batch holds NaN" in message(nn.Linear(4, 2), squared, torch.full((8, 4), math.nan))


def test_the_first_operation_with_its_line() -> None:
    def logarithm(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        masked = out.masked_fill(out > 1e9, -math.inf)  # a mask is no fault
        return (masked - masked.max() - 1).log().mean()  # here

    said = message(nn.Linear(4, 2), logarithm)
    assert "`log` at" in said and "first to give NaN" in said
    line = logarithm.__code__.co_firstlineno + 3
    assert f"test_non_finite.py:{line}" in said


def test_an_infinite_loss() -> None:
    def overflowing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).abs().sum() * 1e38 * 1e10

    assert "`mul` at" in message(nn.Linear(4, 2), overflowing)


def test_a_mask_of_minus_infinity_that_harms_nobody_is_not_named() -> None:
    def masked(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        scores = model(batch)
        mask = torch.zeros_like(scores).masked_fill(torch.tensor([False, True]), -math.inf)
        return (scores + mask).softmax(1)[:, 0].log().mean() + (scores * 0 - 1).sqrt().mean()

    assert "`sqrt` at" in message(nn.Linear(4, 2), masked)
