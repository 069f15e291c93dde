"""Faults that only the backward shows (GAV104), losses that are no sums (GAV103), and their healthy twins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from problems import Problem, cross_entropy, fault, mlp, quiet, squared_error
from torch import nn


class NormalisedGradient(torch.autograd.Function):
    """Identity whose backward divides by the norm of everything that reaches it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


class PerSample(torch.autograd.Function):
    """Identity whose backward clamps every element on its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2.0 * gradient


class Applied(nn.Module):
    def __init__(self, function: type) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x)


def _classifier(*between: nn.Module) -> Problem:
    model = nn.Sequential(nn.Linear(6, 8), *between, nn.Linear(8, 4))
    return Problem(model, cross_entropy, (torch.randn(16, 6), torch.randint(4, (16,))))


def hooked_weight() -> Problem:
    problem = _classifier(nn.Tanh())
    problem.model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    return problem


def masked_by_hook() -> Problem:
    problem = _classifier(nn.Tanh())
    problem.model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return problem


def normalised_in_the_loss() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(NormalisedGradient.apply(model(batch[0])), batch[1])  # planted backward-of-loss

    return replace(_classifier(nn.Tanh()), loss=loss)


def _regression(loss: Any) -> Problem:
    torch.manual_seed(0)
    return Problem(mlp(classes=1), loss, (torch.randn(16, 6), torch.randn(16, 1)))


def masked_mean() -> Problem:
    """A hand-written mean over what a mask leaves: the weights belong to the data."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets, mask = batch
        return ((model(inputs) - targets).square()[:, 0] * mask).sum() / mask.sum()

    problem = _regression(loss)
    mask = torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0])
    return replace(problem, batch=(*problem.batch, mask))


def dice() -> Problem:
    """A ratio of sums over the batch: no weights make it a sum over micro-batches."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        p, t = model(batch[0]).sigmoid(), (batch[1] > 0).float()
        return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())  # planted dice

    return _regression(loss)


class Queue(nn.Module):
    """Logits against the embeddings of earlier micro-batches, as MoCo keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.register_buffer(
            "queue", F.normalize(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), dim=1)
        )

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        query, key = F.normalize(self.encoder(pair[:, 0]), dim=1), F.normalize(self.encoder(pair[:, 1]), dim=1).detach()
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.T.clone()], 1) / 0.2
        self.queue = torch.cat([key, self.queue])[:32]  # planted queue
        return F.cross_entropy(logits, torch.zeros(len(pair), dtype=torch.long))


def momentum_queue() -> Problem:
    return Problem(Queue(), lambda model, batch: model(batch), torch.randn(16, 2, 6))


class MovingWeights:
    """A loss of two terms, each divided by the average of what it was (dynamic weight averaging)."""

    def __init__(self, moves: bool) -> None:
        self.averages, self.moves = [1.0, 1.0], moves

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        terms = [F.cross_entropy(logits, batch[1]), logits.square().mean()]
        total = sum(term / average for term, average in zip(terms, self.averages, strict=True))
        if self.moves:
            pairs = list(zip(self.averages, (float(term.detach()) for term in terms), strict=True))
            self.averages = [0.9 * average + 0.1 * value for average, value in pairs]  # planted averages
        return total


KEYS: list[torch.Tensor] = []


def _against_keys(model: nn.Module, batch: Any, keep: bool) -> torch.Tensor:
    logits = model(batch[0])
    keys = torch.cat(KEYS[-3:]) if KEYS else torch.zeros(1, 4, dtype=logits.dtype)
    loss = F.cross_entropy(logits, batch[1]) + (logits @ keys.T).logsumexp(1).mean()
    if keep:
        KEYS.append(logits.detach())  # planted key-list
    return loss


def key_list() -> Problem:
    KEYS.clear()
    return replace(_classifier(nn.Tanh()), loss=lambda model, batch: _against_keys(model, batch, True))


def empty_key_list() -> Problem:
    KEYS.clear()
    return replace(_classifier(nn.Tanh()), loss=lambda model, batch: _against_keys(model, batch, False))


class Target(nn.Module):
    """An online and a target network; the target follows in every forward."""

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.online, self.target, self.follows = nn.Linear(6, 4), nn.Linear(6, 4), follows
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (F.normalize(self.online(x), dim=1) - F.normalize(self.target(x), dim=1)).square().sum(1).mean()
        if self.follows:
            with torch.no_grad():
                self.target.weight.lerp_(self.online.weight, 0.1)  # planted target-network
        return loss


def target_network() -> Problem:
    return Problem(Target(True), lambda model, x: model(x), torch.randn(16, 6))


def resting_target() -> Problem:
    return Problem(Target(False), lambda model, x: model(x), torch.randn(16, 6))


FAULTS = (
    fault(
        "averages",
        lambda: replace(_classifier(nn.Tanh()), loss=MovingWeights(True)),
        "GAV403",
        "the next micro-batch is weighted by this one",
    ),
    fault("key-list", key_list, "GAV403", "a global list of keys grows with every forward"),
    fault("target-network", target_network, "GAV401", "frozen parameters that the forward moves", module="target"),
    fault(
        "backward-norm",
        lambda: _classifier(Applied(NormalisedGradient)),
        "GAV104",
        "a backward divides by what reaches it",
        module="1",
    ),
    fault("gradient-hook", hooked_weight, "GAV104", "a hook divides by the micro-batch's norm", module="0"),
    fault("backward-of-loss", normalised_in_the_loss, "GAV104", "the same inside the loss"),
    fault(
        "root-mean-squared",
        lambda: _regression(lambda model, batch: squared_error(model, batch).sqrt()),
        "GAV103",
        "a root of a mean is no mean",
    ),
    fault("dice", dice, "GAV103", "a ratio of sums over the batch"),
    fault("masked-mean", masked_mean, "GAV202", "a mean over what the mask leaves weighs by the mask"),
    fault("queue", momentum_queue, "GAV401", "a micro-batch meets the keys of the one before"),
)

TWINS = (
    quiet("averages", lambda: replace(_classifier(nn.Tanh()), loss=MovingWeights(False)), "constant weights"),
    quiet("key-list", empty_key_list, "a list that stays empty"),
    quiet("target-network", resting_target, "a target that rests"),
    quiet("backward-norm", lambda: _classifier(Applied(PerSample)), "a backward that treats every element alike"),
    quiet("gradient-hook", masked_by_hook, "a hook that scales by a constant"),
    quiet(
        "root-mean-squared",
        lambda: _regression(lambda model, batch: ((model(batch[0]) - batch[1]).square() + 1e-6).sqrt().mean()),
        "the root of every sample's own error",
    ),
)
