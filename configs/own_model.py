"""A model of your own, as `gaverify run configs/own-model.toml` finds it: a function that returns what to verify.

Copy this file, put your model, your loss and a batch of your data in, and name the function in a spec or on the line:

    gaverify run --model own_model.py:small_resnet --model-arg norm=batch --steps 4
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import gaverify

CLASSES = 10


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, channels: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            normalisation(norm, channels),
            nn.SiLU(),
            nn.Dropout2d(dropout),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            normalisation(norm, channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the shortcut and the convolutions say together."""
        return F.silu(x + self.body(x))


def normalisation(norm: str, channels: int) -> nn.Module:
    """Returns the layer under suspicion: "group" looks at one sample, "batch" at all of a micro-batch."""
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(4, channels)


def small_resnet(
    batch_size: int = 8, channels: int = 16, norm: str = "group", dropout: float = 0.1
) -> gaverify.Problem:
    """Returns the problem: gaverify has seeded the generators, so the same seed gives the same weights and data.

    Keywords are what `--model-arg` (or `[model-args]`) may set; `batch_size` is set by `--batch-size`.
    """
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        ResidualBlock(channels, norm, dropout),
        nn.MaxPool2d(2),
        ResidualBlock(channels, norm, dropout),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, CLASSES),
    )
    # Random images suffice to find a coupling of samples. Take real ones where your loss or your layers need them:
    #     batch = next(iter(DataLoader(my_dataset, batch_size=batch_size)))
    batch = {"image": torch.randn(batch_size, 3, 16, 16), "label": torch.randint(CLASSES, (batch_size,))}
    return gaverify.Problem(model, loss, batch)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Runs the forward and returns the loss of exactly this batch: what your training loop calls `backward` on."""
    return F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1)
