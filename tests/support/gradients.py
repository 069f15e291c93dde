"""Gradients of modules, and how far two lists of them are apart."""

from __future__ import annotations

import torch
from torch import nn


def gradients(*modules: nn.Module) -> list[torch.Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert len(actual) == len(expected) > 0
    squares = sum(float((a - e).double().square().sum()) for a, e in zip(actual, expected, strict=True))
    return (squares / sum(float(e.double().square().sum()) for e in expected)) ** 0.5
