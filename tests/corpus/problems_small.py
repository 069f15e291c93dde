"""Faults of a chosen small size, in models whose rounding is small, grown through depth, or hidden by zero gradients.

Shapes: B = 8 samples in K = 4 micro-batches.

`planted(family, kind, size)` plants one fault and scales it until the gradients differ by `size`, measured by a loop of
plain torch in float64 that shares no code with gaverify. Size 0 is the healthy twin.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from problems import Parts
from torch import nn

from gaverify import Problem

Wrap = Callable[[nn.Module], nn.Module]
B, STEPS = 8, 4
FAMILIES = ("mlp", "convolutions", "language-model")
KINDS = ("weight", "buffer", "spectral-norm", "early-gain", "late-gain")


class Counted(nn.Module):
    """Multiplies by 1 + amount · (forwards so far): state that the next micro-batch reads."""

    def __init__(self) -> None:
        super().__init__()
        self.amount = 0.0
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * (1 + self.amount * self.forwards)
        if self.amount:
            self.forwards += 1
        return scaled


class _Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: torch.Tensor, amount: float) -> torch.Tensor:
        ctx.save_for_backward(x, gain)
        ctx.amount = amount
        return x * gain

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, gain = ctx.saved_tensors
        own = (upstream * x).sum(tuple(i for i in range(x.dim()) if gain.shape[i] == 1), keepdim=True)
        return upstream * gain, own * (1 + ctx.amount * (B / len(x) - 1)), None


class Gain(nn.Module):
    """A factor per channel whose own gradient, and nothing else, depends on the size of the batch."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.amount, self.gain = 0.0, nn.Parameter(1 + 0.1 * torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Gain.apply(x, self.gain, self.amount)


def _mlp(normed: Wrap) -> tuple[nn.Module, Any]:
    wide = (1, 32)
    model = nn.Sequential(
        nn.Linear(16, 32),
        Gain(wide),
        Counted(),
        nn.Tanh(),
        normed(nn.Linear(32, 32)),
        nn.Tanh(),
        Gain(wide),
        nn.Linear(32, 4),
    )
    return model, (torch.randn(B, 16), torch.randint(4, (B,)))


class _Residual(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(F.gelu(self.norm(x)))


def _convolutions(normed: Wrap) -> tuple[nn.Module, Any]:
    """Rounding grows through depth: some parameters differ by more than 16 u, and nothing is wrong."""
    shape = (1, 8, 1, 1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Gain(shape),
        Counted(),
        *(_Residual(norm=nn.GroupNorm(2, 8), conv=nn.Conv2d(8, 8, 3, padding=1)) for _ in range(10)),
        normed(nn.Conv2d(8, 8, 1)),
        nn.GroupNorm(2, 8),
        Gain(shape),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return model, (torch.randn(B, 3, 16, 16), torch.randint(4, (B,)))


class _LanguageModel(nn.Module):
    """Embeddings as `nn.Embedding` draws them, N(0, 1), and tied: the gradients of some norms cancel to zero."""

    def __init__(self, normed: Wrap, words: int = 50, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(12, width)
        self.early, self.count = Gain((1, 1, width)), Counted()
        layer = nn.TransformerEncoderLayer(width, heads, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mixed, self.norm, self.late = normed(nn.Linear(width, width)), nn.LayerNorm(width), Gain((1, 1, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.late(self.norm(self.mixed(self.layers(self.count(self.early(x))))))
        return x @ self.words.weight.T


def _language_model(normed: Wrap) -> tuple[nn.Module, Any]:
    tokens = torch.randint(50, (B, 13))
    return _LanguageModel(normed), (tokens[:, :-1], tokens[:, 1:])


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


_MODELS: dict[str, Callable[[Wrap], tuple[nn.Module, Any]]] = {
    "mlp": _mlp,
    "convolutions": _convolutions,
    "language-model": _language_model,
}


def planted(family: str, kind: str, size: float, seed: int = 0) -> tuple[Problem, dict[str, Any], float]:
    """Returns the problem, the options of `verify`, and the difference that a loop by hand measures in float64.

    Args:
        family: One of `FAMILIES`.
        kind: One of `KINDS`.
        size: The relative difference of the parameter that differs most; 0 plants nothing.
        seed: Of weights and data.
    """
    torch.manual_seed(seed)
    spectral = bool(size) and kind == "spectral-norm"
    model, batch = _MODELS[family](nn.utils.parametrizations.spectral_norm if spectral else lambda layer: layer)
    weights = [1 / STEPS] * STEPS
    gains = [module for module in model.modules() if isinstance(module, Gain)]
    counted = next(module for module in model.modules() if isinstance(module, Counted))
    if spectral:
        _warmed(model, batch, size)
    elif size:
        amount = size
        for _ in range(2):  # in proportion: the second time is exact
            if kind == "weight":
                weights[1] = (1 + amount) / STEPS
            elif kind == "buffer":
                counted.amount = amount
            else:
                gains[0 if kind == "early-gain" else -1].amount = amount
            amount *= size / by_hand(model, batch, weights)
            counted.forwards.zero_()
    options = {"weighting": weights, "steps": STEPS}
    return Problem(model, _loss, batch), options, by_hand(model, batch, weights)


def _warmed(model: nn.Module, batch: Any, size: float) -> None:
    """Lets the power iteration go on until its steps change the gradients by no more than `size`."""
    while by_hand(model, batch, [1 / STEPS] * STEPS) > size:
        with torch.no_grad():
            model(batch[0])


def by_hand(model: nn.Module, batch: Any, weights: list[float]) -> float:
    """Returns the largest relative difference of any parameter between both strategies, in float64."""
    gradients = []
    for sizes in ((B,), (B // STEPS,) * STEPS):
        own = copy.deepcopy(model).double()
        for part, weight in zip(_parts(batch, sizes), weights if len(sizes) > 1 else [1.0], strict=True):
            (_loss(own, part) * weight).backward()
        gradients.append([parameter.grad for parameter in own.parameters()])
    largest = max(float(gradient.norm()) for gradient in gradients[0])
    found = [(float((a - e).norm()), float(e.norm())) for e, a in zip(*gradients, strict=True)]
    return max(difference / norm for difference, norm in found if norm > 1e-9 * largest)


def _parts(batch: Any, sizes: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    split = [tensor.split(list(sizes)) for tensor in batch]
    double = [[part.double() if part.is_floating_point() else part for part in parts] for parts in split]
    assert math.isclose(sum(sizes), B)
    return list(zip(*double, strict=True))
