"""`mlp`: the smallest network whose accumulated gradient is right."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gaverify.passes.batching import Problem
from gaverify.zoo import at_least

FEATURES = 16


def build(batch_size: int = 8, width: int = 32) -> Problem:
    """Returns Linear(16, width), GELU, Linear(width, 1) on normal data with the mean squared error.

    Shapes: inputs (B, 16), targets (B, 1).
    """
    at_least(1, width=width)
    batch = regression_batch(batch_size)
    model = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, 1))
    return Problem(model, regression_loss, batch, name="mlp")


def regression_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns normal inputs (B, 16) and targets (B, 1).

    Drawn before the weights, so that every model that is built from the same seed gets the same batch.
    """
    return torch.randn(batch_size, FEATURES), torch.randn(batch_size, 1)


def regression_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Returns the mean squared error of `model` on (inputs, targets)."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)
