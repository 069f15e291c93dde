"""Traps for the verifier itself: batches that cannot tell, missing gradients, draws that cannot be dealt out."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from problems import Parts, classified, cross_entropy, fault, language_model, mlp, quiet, token_batch, token_loss
from problems_coupling import squared_batch_norm
from problems_lookalikes import nn_loss
from problems_weights import mean_loss, packed_tokens
from torch import nn

from gaverify import Problem


def untied_twice_with_tie_between() -> Problem:
    """Two embeddings that share a weight; each scales the rows that it looks up in place."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(11, 8, max_norm=1.0)
            self.second = nn.Embedding(11, 8, max_norm=1.0)
            self.second.weight = self.first.weight
            self.head = nn.Linear(8, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.first(tokens).mean(1) * self.second(tokens).mean(1))

    return Problem(Twice(), cross_entropy, (torch.arange(8)[:, None].repeat(1, 2), torch.randint(4, (8,))))


def head_for_large_batches() -> Problem:
    """A second head that takes part above 8 samples only: a gradient of None, which is no zero."""

    class Heads(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + (0 * self.extra(x) if len(x) > 8 else 0)  # planted None-is-no-zero

    return classified(Heads(inner=nn.Linear(6, 4), extra=nn.Linear(6, 4)), 6)


def drawn_by_python() -> Problem:
    """A number per sample from the user's own generator: how much is drawn depends on the batch, unseen."""
    generator = random.Random(0)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        noise = torch.tensor([[generator.gauss(0, 1)] for _ in range(len(x))], dtype=x.dtype)
        return F.cross_entropy(model(x + noise), y)

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


def never_the_same() -> Problem:
    """Noise from a generator that no seed reaches: the full batch differs from itself."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        noise = random.SystemRandom().random()
        return F.cross_entropy(model(x * (1 + noise)), y)

    return replace(mean_loss(), loss=loss)


def class_weights_averaged() -> Problem:
    """A mean over class weights: micro-batches of one class weigh what that class weighs."""
    classes = torch.tensor([0, 0, 1, 0, 3, 3, 2, 3, 1, 2, 0, 1, 3, 3, 3, 3])
    return Problem(mlp(), nn_loss(torch.tensor([0.2, 1.0, 2.0, 5.0])), (torch.randn(16, 6), classes))


def empty_micro_batch() -> Problem:
    torch.manual_seed(0)
    return Problem(language_model(), token_loss, token_batch((6, 1, 0, 0, 4, 3, 2, 5)))


def sine_of_zero() -> Problem:
    """Every gradient is exactly zero."""
    return replace(mean_loss(), loss=lambda m, b: 0.0 * cross_entropy(m, b))


def not_a_number() -> Problem:
    return replace(mean_loss(), loss=lambda m, b: cross_entropy(m, b) * float("nan"))


def all_the_same() -> Problem:
    """BatchNorm on copies of one sample, whose statistics are the same in every micro-batch."""
    problem = squared_batch_norm()
    x, y = problem.batch
    return replace(problem, batch=(x[:1].repeat(8, 1), y[:1].repeat(8, 1)))


def frozen_altogether() -> Problem:
    problem = mean_loss()
    problem.model.requires_grad_(False)
    return problem


def without_parameters() -> Problem:
    return replace(mean_loss(), model=nn.Flatten())


FAULTS = (
    fault("None-is-no-zero", head_for_large_batches, "GAV502", "one run has no gradient for `extra`"),
    fault("python-draws", drawn_by_python, "GAV302", "random numbers in a Python list have no row per sample"),
    fault("never-the-same", never_the_same, "GAV403", "noise from outside: no two runs of the same batch agree"),
    fault("class-weights", class_weights_averaged, "GAV202", "micro-batches weigh 1.6, 17, 3.2 and 20"),
    fault("empty-micro-batch", empty_micro_batch, "GAV203", "three micro-batches of 7 targets, and one of none"),
)

TWINS = (
    quiet("tied-max-norm", untied_twice_with_tie_between, "both modules scale the rows that they look up"),
    quiet("None-is-no-zero", head_for_large_batches, "no micro-batch and no full batch above 8", steps=1),
    quiet("class-weights", class_weights_averaged, "weighted by the classes' weights", weighting="tokens"),
)


def drawn_negatives() -> Problem:
    """Five negatives for every pair in one flat draw, as word2vec draws them."""

    class Skipgram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Embedding(20, 6), nn.Embedding(20, 6)
            self.register_buffer("frequencies", torch.rand(20))

        def forward(self, centre: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
            negatives = torch.multinomial(self.frequencies, 5 * len(centre), replacement=True).view(-1, 5)
            vector = self.inner(centre)
            wrong = (self.outer(negatives) @ vector[..., None])[..., 0]
            return -(F.logsigmoid((vector * self.outer(context)).sum(1)) + F.logsigmoid(-wrong).sum(1)).mean()

    pairs = (torch.randint(20, (16,)), torch.randint(20, (16,)))
    return Problem(Skipgram(), lambda model, batch: model(*batch), pairs)


UNALIGNED = (drawn_by_python, drawn_negatives, partial(packed_tokens, of_inputs=True))


def disagreeing_rows() -> Problem:
    torch.manual_seed(0)
    return Problem(mlp(), cross_entropy, (torch.randn(16, 6), torch.randint(4, (15,))))
