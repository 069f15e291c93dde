"""`toy-linear`: one weight, whose gradient can be worked out on paper."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gaverify.passes.problem import Problem


def build(batch_size: int = 2) -> Problem:
    """Returns y = w·x with w = 1, targets 2x and the mean squared error.

    Formula: with x = (4, 2) the gradient is the mean of 2x(wx − 2x) = −2x², that is −20; each sample's alone is −32
        and −8. Larger batches go on with 6, 8, 10, …; a batch of one is x = 4.

    Shapes: x and targets (B, 1).
    """
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    x = torch.tensor([4.0, 2.0, *(2.0 * n for n in range(3, batch_size + 1))])[:batch_size].unsqueeze(1)
    return Problem(model, _loss, (x, 2 * x), name="toy-linear")


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, targets = batch
    return F.mse_loss(model(x), targets)
