"""Problems for `bench_peers.py`: planted faults of every kind, and equivalent ones that look like faults.

Shapes: B = 8 samples of 16 features, 4 classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import problems_small
import torch
import torch.nn.functional as F
from torch import nn

B, STEPS = 8, 4


@dataclass
class Planted:
    """A problem, the weights under test, and whether something is wrong with it."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], torch.Tensor]
    batch: tuple[torch.Tensor, torch.Tensor]
    weights: list[float]
    fault: bool


Peer = Callable[[Planted], bool]
"""Whether a peer calls the accumulated gradient, or the model, wrong."""


class Centred(nn.Module):
    """Subtracts the batch's mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


class _ByBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return upstream * (len(upstream) / B)


class ByBatch(nn.Module):
    """A backward whose factor is the size of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ByBatch.apply(x)


def _network(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), *between, nn.Tanh(), nn.Linear(32, 4))


def _mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(outputs @ outputs.t() / 0.5, torch.arange(len(outputs), device=outputs.device))


def _made(
    model: nn.Module,
    loss: Callable[..., torch.Tensor] = _mean,
    *,
    weight: float = 0.25,
    padded: bool = False,
    fault: bool,
) -> Planted:
    targets = torch.randint(4, (B,))
    if padded:
        targets[torch.tensor([3, 4, 6])] = -100
    return Planted(model, loss, (torch.randn(B, 16), targets), [weight] * STEPS, fault)


def _small(family: str, kind: str, size: float) -> Callable[[], Planted]:
    def build() -> Planted:
        problem, options, _ = problems_small.planted(family, kind, size)
        weights = options.get("weighting")
        weights = list(weights) if isinstance(weights, list | tuple) else [0.25] * STEPS
        return Planted(problem.model, problem.loss, problem.batch, weights, size > 0)

    return build


PROBLEMS: dict[str, Callable[[], Planted]] = {
    "the loss is not divided": lambda: _made(_network(), weight=1.0, fault=True),
    "means of unequal token counts": lambda: _made(_network(), padded=True, fault=True),
    "BatchNorm": lambda: _made(_network(nn.BatchNorm1d(32)), fault=True),
    "the batch's mean subtracted": lambda: _made(_network(Centred()), fault=True),
    "in-batch negatives": lambda: _made(_network(), _contrastive, fault=True),
    "a backward that knows the batch": lambda: _made(_network(ByBatch()), fault=True),
    "a weight 6e-5 off": _small("mlp", "weight", 6e-5),
    "a buffer, 1e-5": _small("mlp", "buffer", 1e-5),
    "a spectral norm, 1e-5": _small("mlp", "spectral-norm", 1e-5),
    "a weight 3e-6 off": _small("mlp", "weight", 3e-6),
    "equivalent": lambda: _made(_network(), fault=False),
    "equivalent, with dropout": lambda: _made(_network(nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.3)), fault=False),
    "equivalent, rounding grown through depth": _small("convolutions", "weight", 0.0),
}
