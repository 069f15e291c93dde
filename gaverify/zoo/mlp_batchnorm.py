"""`mlp-batchnorm`: the smallest network whose accumulated gradient is wrong."""

from __future__ import annotations

from torch import nn

from gaverify.passes.batching import Problem
from gaverify.zoo import at_least
from gaverify.zoo.mlp import FEATURES, regression_batch, regression_loss


def build(batch_size: int = 8, width: int = 32) -> Problem:
    """Returns Linear(16, width), BatchNorm1d(width), Linear(width, 1) on the batch of `mlp`.

    Shapes: inputs (B, 16), targets (B, 1).
    """
    at_least(1, width=width)
    batch = regression_batch(batch_size)
    model = nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    return Problem(model, regression_loss, batch, name="mlp-batchnorm")
