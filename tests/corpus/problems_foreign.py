"""Healthy models whose batches cannot be sliced, or whose draws torch does not make, and faulty twins.

Shapes: B = 8 or 16 samples of 6 features in 4 micro-batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from problems import classified, mlp, quiet
from problems_architectures import ARCHITECTURES, LENGTHS, dropping, faulty, healthy
from torch import nn

from gaverify import Problem


def _nested(layout: torch.layout) -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(torch.nested.to_padded_tensor(model(batch[0]), 0.0).sum(1), batch[1])

    rows = torch.nested.nested_tensor([torch.randn(size, 6) for size in LENGTHS], layout=layout)
    return Problem(dropping(), loss, (rows, torch.randint(4, (8,))))


@healthy("a batch as a nested tensor, drawn for in one piece")
def nested_batch() -> Problem:
    return _nested(torch.jagged)


@healthy("a nested tensor of the older layout has no shape")
def strided_nested_batch() -> Problem:
    return _nested(torch.strided)


def _sparse(layout: torch.layout) -> Problem:
    def loss(model: nn.Linear, batch: Any) -> torch.Tensor:
        return F.cross_entropy(torch.sparse.mm(batch[0], F.dropout(model.weight.t(), 0.2)) + model.bias, batch[1])

    rows = torch.randn(8, 6).relu().to_sparse(layout=layout)
    return Problem(nn.Linear(6, 4), loss, (rows, torch.randint(4, (8,))))


ARCHITECTURES += [
    quiet(name, lambda layout=layout: _sparse(layout), "a sparse batch cannot be sliced")
    for name, layout in {"sparse_coo_batch": torch.sparse_coo, "sparse_csr_batch": torch.sparse_csr}.items()
]


class InnerFloat32(nn.Module):
    """Normalises in float32, whatever it is given, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.first(x), 0.2).float()
        return self.head((hidden * torch.exp(-hidden.pow(2).cumsum(1))).to(x.dtype))


@healthy("float32 rounding inside a model that was asked for in float64", dtype="float64")
def float32_inside_float64() -> Problem:
    return classified(InnerFloat32(), 6)


def _noised(draw: Callable[[int], Any]) -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        noise = torch.as_tensor(numpy.asarray(draw(len(x))), dtype=x.dtype).reshape(-1, 1)
        return F.cross_entropy(model(x + 0.5 * noise), y)

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


FOREIGN: dict[str, Callable[[int], Any]] = {
    "numpy-array": lambda n: numpy.random.randn(n),
    "numpy-arrays": lambda n: numpy.random.rand(n) + numpy.random.normal(0.0, 1.0, n),
    "numpy-integers": lambda n: numpy.random.randint(0, 5, size=(n,)),
    "numpy-choice": lambda n: numpy.random.choice([1.0, 2.0], size=n, p=[0.3, 0.7]),
    "numpy-per-sample": lambda n: [numpy.random.choice(9, 2, replace=False)[0] for _ in range(n)],
    "python-per-sample": lambda n: [random.gauss(0, 1) for _ in range(n)],
    "python-sample": lambda n: [random.sample(range(9), 3)[0] for _ in range(n)],
    "python-branch": lambda n: [random.random() if random.random() < 0.5 else 0.0 for _ in range(n)],
    "once-and-per-sample": lambda n: numpy.random.rand() + numpy.array([random.random() for _ in range(n)]),
}
ARCHITECTURES += [
    quiet(name, lambda draw=draw: _noised(draw), "draws from global generators are made again", notes="GAV301")
    for name, draw in FOREIGN.items()
]


@faulty("one Python call draws a list for the whole batch: it has no rows that could be dealt out", "GAV302")
def python_choices() -> Problem:
    return _noised(lambda n: random.choices([1.0, 2.0, 3.0], k=n))


@faulty("a permutation of the batch has no rows of its own for a micro-batch", "GAV302")
def numpy_permutation() -> Problem:
    return _noised(lambda n: numpy.random.permutation(n))
