"""`mnist-mlp`: a four-layer digit classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gaverify.passes.problem import Problem
from gaverify.zoo.digits import drawn_digits, read_digits


def build(batch_size: int = 32, data: str = "") -> Problem:
    """Returns 784-512-256-128-10 with ReLU and cross entropy.

    Args:
        batch_size: B.
        data: A folder with MNIST's training files, of which the first B samples are taken; "": digits drawn here.

    Shapes: images (B, 1, 28, 28) from 0 to 1, targets (B,) from 0 to 9.
    """
    batch = read_digits(data, batch_size) if data else drawn_digits(batch_size)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    return Problem(model, _loss, batch, name="mnist-mlp")


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, targets = batch
    return F.cross_entropy(model(images), targets)
