"""Look-alikes that draw random numbers: every draw is dealt out per sample, so that none of these may be flagged."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from problems import Case, Net, classified, language_model, listed, mlp
from torch import nn

from gaverify import Problem

RANDOM: list[Case] = []
replayed = listed(RANDOM)


def Lambda(function: Any) -> nn.Module:
    """A module around a function of one tensor."""
    return Net(lambda _, x: function(x))


def noisy(*functions: Any) -> Problem:
    """Linear layers with a random function after each but the last."""
    layers = [layer for function in functions for layer in (nn.Linear(8, 8), Lambda(function))]
    return classified(nn.Sequential(*layers, nn.Linear(8, 4)), 8)


@replayed("functional dropout", notes="GAV301")
def functional_dropout() -> Problem:
    return noisy(lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.2))


@replayed("one mask row per sample", notes="GAV301")
def drop_path() -> Problem:
    def drop(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(len(x), 1) + 0.7).floor() / 0.7

    return noisy(drop, drop)


@replayed("one mask per sample of a sequence, drawn in place", notes="GAV301")
def drop_path_in_place() -> Problem:
    def drop(x: torch.Tensor) -> torch.Tensor:
        return x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.6).div_(0.6)

    model = nn.Sequential(nn.Linear(8, 8), Lambda(drop), nn.Linear(8, 8), Lambda(drop), nn.Flatten(), nn.Linear(24, 4))
    return classified(model, 3, 8)


class Stack(nn.Module):
    """Residual layers, each of which is dropped where its draw is small; the draws take turns."""

    def __init__(self, *draws: Callable[[], Any]) -> None:
        super().__init__()
        self.layers, self.head, self.draws = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 4), draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if self.draws[index % len(self.draws)]() > 0.4:
                x = x + layer(x).tanh()
        return self.head(x)


@replayed("a layer is dropped once per forward, whatever the batch")
def layer_drop() -> Problem:
    return classified(Stack(lambda: torch.rand(())), 8)


@replayed("the same with Python's and NumPy's generators")
def layer_drop_outside_torch() -> Problem:
    return classified(Stack(lambda: random.random(), lambda: numpy.random.rand()), 8)


@replayed("the same with generators that the layers hold themselves")
def layer_drop_with_own_generators() -> Problem:
    old, new = numpy.random.RandomState(0), numpy.random.default_rng(1)
    return classified(Stack(old.rand, new.random, random.Random(2).random), 8)


@replayed("slopes drawn per element", notes="GAV301")
def randomised_relu() -> Problem:
    return classified(nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 4)), 8)


@replayed("whole channels", notes="GAV301")
def channel_dropout() -> Problem:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Dropout2d(0.4), nn.Conv2d(4, 4, 3), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(16, 4)
    )
    return classified(model, 3, 6, 6, size=8)


@replayed("dropout that keeps mean and variance", notes="GAV301")
def alpha_dropout() -> Problem:
    return classified(
        nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.3), nn.Linear(8, 8), nn.AlphaDropout(0.3), nn.Linear(8, 4)), 8
    )


@replayed("exponential draws per logit", notes="GAV301")
def gumbel() -> Problem:
    return noisy(lambda x: F.gumbel_softmax(x, tau=0.7), lambda x: F.gumbel_softmax(x, hard=True))


@replayed("noise of the shape of the activations", notes="GAV301")
def gaussian_noise() -> Problem:
    return noisy(lambda x: x + 0.5 * torch.randn_like(x), lambda x: x + torch.empty_like(x).normal_(0, 0.3))


@replayed("the loss draws noise and time steps", notes="GAV301")
def diffusion() -> Problem:
    model = Net(lambda net, x, t: net.inner(x + net.time(t)), time=nn.Embedding(20, 6), inner=mlp(6, 16, 6))
    model.register_buffer("kept", torch.linspace(0.99, 0.01, 20))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        t = torch.randint(0, 20, (len(batch),))
        noise, kept = torch.randn_like(batch), model.kept[t][:, None]
        return F.mse_loss(model(kept.sqrt() * batch + (1 - kept).sqrt() * noise, t), noise)

    return Problem(model, loss, torch.randn(16, 6))


@replayed("latents are drawn per sample", notes="GAV301")
def variational_autoencoder() -> Problem:
    def loss(model: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = model["encoder"](x).chunk(2, 1)
        z = torch.distributions.Normal(mean, torch.exp(0.5 * log_variance)).rsample()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        return (F.mse_loss(model["decoder"](z), x, reduction="none").sum(1) + divergence).mean()

    model = nn.ModuleDict({"encoder": mlp(6, 8, 6), "decoder": mlp(3, 8, 6)})
    return Problem(model, loss, torch.randn(16, 6))


@replayed("a share per sample from a Beta distribution, mixed with the sample's own other view")
def beta_shares() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        share = torch.distributions.Beta(0.4, 0.4).sample((len(x),))[:, None].to(x.dtype)
        return F.cross_entropy(model(share * x + (1 - share) * x.flip(1)), y)

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


@replayed("patches are hidden by the order of noise within each sample", notes="GAV301")
def masked_autoencoder() -> Problem:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape[:2]).argsort(1)[:, :3]
        seen = x.gather(1, kept[..., None].expand(-1, -1, x.shape[2]))
        return (model(seen.flatten(1)) - x.mean(1)).square().mean()

    return Problem(mlp(18, 8, 6), loss, torch.randn(8, 6, 6))


@replayed("hidden tokens differ in number, and are weighted so", weighting="tokens", notes="GAV301")
def masked_language_model() -> Problem:
    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.bernoulli(torch.full(tokens.shape, 0.4)).bool()
        labels = tokens.masked_fill(~hidden, -100)
        logits = model(tokens.masked_fill(hidden, 10))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Problem(language_model(), loss, torch.randint(10, (8, 6)))


@replayed("noise for the selected rows only, in the order of the batch")
def noise_for_selected_rows() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, chosen = batch
        x = x.clone()
        x[chosen] = x[chosen] + torch.randn(int(chosen.sum()), x.shape[1], dtype=x.dtype)
        return F.cross_entropy(model(x), y)

    chosen = torch.tensor([1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 1]).bool()
    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,)), chosen))


@replayed("one category per sample", notes="GAV301")
def sampled_actions() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        policy = torch.distributions.Categorical(logits=model(batch[0]))
        return -(policy.log_prob(policy.sample()) * batch[1]).mean()

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randn(16)))


@replayed("counts per sample")
def poisson_counts() -> Problem:
    return Problem(mlp(classes=3), lambda m, b: F.mse_loss(m(b), torch.poisson(b[:, :3].abs() + 1)), torch.randn(16, 6))


@replayed("a permutation of the features, once per forward")
def shuffled_channels() -> Problem:
    return noisy(lambda x: x[:, torch.randperm(8)])


@replayed("a crop drawn once per forward")
def random_crop() -> Problem:
    def crop(x: torch.Tensor) -> torch.Tensor:
        start = int(torch.randint(0, 4, ()))
        return x[:, start : start + 5]

    return classified(nn.Sequential(Lambda(crop), nn.Linear(5, 4)), 8)
