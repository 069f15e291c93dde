"""Look-alikes in the recipe: how batches look, how losses are weighted, in which precision and of which size."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from problems import classified, cross_entropy, mlp, squared_error
from problems_lookalikes import lookalike
from problems_quiet import Pooled
from problems_weights import mean_loss
from torch import nn

from gaverify import Problem


@dataclass
class Pictures:
    pixels: torch.Tensor
    classes: torch.Tensor
    names: list[str]


@lookalike("a dataclass with names beside the tensors")
def dataclass_batch() -> Problem:
    batch = Pictures(torch.randn(16, 6), torch.randint(4, (16,)), [f"picture {n}" for n in range(16)])

    def loss(model: nn.Module, batch: Pictures) -> torch.Tensor:
        assert len(batch.names) == len(batch.pixels)
        return F.cross_entropy(model(batch.pixels), batch.classes)

    return Problem(mlp(), loss, batch)


Sample = namedtuple("Sample", "x y")


@lookalike("a named tuple in a dict")
def nested_batch() -> Problem:
    return Problem(
        mlp(),
        lambda m, b: F.cross_entropy(m(b["a"].x), b["a"].y) * b["scale"],
        {"a": Sample(torch.randn(16, 6), torch.randint(4, (16,))), "scale": 2.0},
    )


@lookalike("a list of samples of different length")
def variable_lengths() -> Problem:
    samples = [(torch.randn(length, 6), n % 4) for n, length in enumerate((3, 9, 4, 1, 7, 7, 2, 5))]

    def loss(model: nn.Module, batch: list[Any]) -> torch.Tensor:
        logits = torch.stack([model(x).mean(0) for x, _ in batch])
        return F.cross_entropy(logits, torch.tensor([label for _, label in batch]))

    return Problem(mlp(), loss, samples)


@lookalike("samples of 3, 3, 3 and 1, weighted by their number", weighting="samples")
def short_tail() -> Problem:
    return classified(mlp(), 6, size=10)


@lookalike("each sample has a weight of its own; the divisor is the number of samples")
def sample_weights() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (batch[2] * F.cross_entropy(model(batch[0]), batch[1], reduction="none")).mean()

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,)), torch.rand(16) + 0.1))


@lookalike(
    "divided by the sum of the sample weights, and weighted accordingly",
    weighting=lambda micro_batch, batch: micro_batch[2].sum() / batch[2].sum(),
)
def normalised_sample_weights() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (batch[2] * F.cross_entropy(model(batch[0]), batch[1], reduction="none")).sum() / batch[2].sum()

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,)), torch.rand(16) + 0.1))


@lookalike("class weights make the divisor; tokens counts them", weighting="tokens")
def class_weights() -> Problem:
    return replace(mean_loss(), loss=nn_loss(torch.tensor([0.2, 1.0, 2.0, 5.0])))


def nn_loss(weight: torch.Tensor) -> Any:
    """Cross entropy with class weights."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1], weight=weight.to(logits.dtype))

    return loss


@lookalike("float64 throughout", dtype="float64")
def in_float64() -> Problem:
    return mean_loss()


@lookalike("float16 throughout", dtype="float16")
def in_float16() -> Problem:
    return mean_loss()


@lookalike("bfloat16 parameters, LayerNorm and attention", dtype="bfloat16")
def transformer_in_bfloat16() -> Problem:
    return classified(Pooled(), 5, 8, size=8)


@lookalike("autocast rounds activations to bfloat16", autocast="bfloat16")
def autocast_bfloat16() -> Problem:
    return classified(Pooled(0.2), 5, 8, size=8)


@lookalike("a mean times a million")
def large_loss() -> Problem:
    return replace(mean_loss(), loss=lambda m, b: 1e6 * cross_entropy(m, b))


@lookalike("a mean over a million")
def tiny_loss() -> Problem:
    return replace(mean_loss(), loss=lambda m, b: 1e-6 * cross_entropy(m, b))


@lookalike("a loss so small that its gradients are near the smallest normal number")
def vanishing_loss() -> Problem:
    return replace(mean_loss(), loss=lambda m, b: 1e-30 * cross_entropy(m, b))


@lookalike("one sample each", steps=16)
def one_sample_each() -> Problem:
    return mean_loss()


@lookalike("K = 1 compares the batch with itself", steps=1, notes="GAV901")
def one_step() -> Problem:
    return mean_loss()


@lookalike("data of size 1e4 beside data of size 1e-4")
def extreme_values() -> Problem:
    x = torch.randn(16, 6) * torch.logspace(-4, 4, 16)[:, None]
    return Problem(nn.Linear(6, 3), squared_error, (x, torch.randn(16, 3)))


@lookalike("terms that cancel to a thousandth of their size")
def cancelling_gradients() -> Problem:
    x = torch.randn(8, 6)
    x, y = torch.cat([x, x]), torch.cat([torch.full((8, 1), 100.0), torch.full((8, 1), -100.0)])
    return Problem(nn.Linear(6, 1), squared_error, (x + 1e-3 * torch.randn(16, 6), y))
