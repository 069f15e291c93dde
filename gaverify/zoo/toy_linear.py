"""`toy-linear`: one weight, whose gradient can be worked out on paper."""

from __future__ import annotations

import torch
from torch import nn

from gaverify.passes.batching import Problem
from gaverify.zoo.mlp import regression_loss


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
    return Problem(model, regression_loss, (x, 2 * x), name="toy-linear")
