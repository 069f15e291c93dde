"""Look-alikes that draw random numbers, wherever the samples lie in a draw: none of these may be flagged."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from problems import Case, Net, classified, cross_entropy, language_model, listed, mlp, squared_error
from torch import nn
from torch.utils.checkpoint import checkpoint

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


@replayed("attention draws for every head", notes="GAV301")
def multihead_dropout() -> Problem:
    def attend(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.head(net.attention(x, x, x, need_weights=False)[0].mean(1))

    attention = nn.MultiheadAttention(8, 4, dropout=0.3, batch_first=True)
    return classified(Net(attend, attention=attention, head=nn.Linear(8, 4)), 5, 8, size=8)


@replayed("fused attention draws inside its kernel", notes="GAV301")
def fused_attention_dropout() -> Problem:
    def attend(net: Net, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in net.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        return net.head(mixed.transpose(1, 2).flatten(2).mean(1))

    return classified(Net(attend, qkv=nn.Linear(8, 24), head=nn.Linear(8, 4)), 5, 8, size=8)


@replayed("heads are the outer, samples the inner index of a folded dimension", notes="GAV301")
def heads_outside() -> Problem:
    def fold(net: Net, x: torch.Tensor) -> torch.Tensor:
        folded = torch.cat(x.chunk(2, 1))  # (2·B, 4): head-major
        folded = F.dropout(net.inner(folded), 0.5).relu()
        return net.head(torch.cat(folded.chunk(2), 1))

    return classified(Net(fold, inner=nn.Linear(4, 4), head=nn.Linear(8, 4)), 8)


def _checkpointed(reentrant: bool) -> Problem:
    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = net.first(x)
        for block in net.blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant)
        return net.head(x)

    first, head = nn.Linear(8, 8), nn.Linear(8, 4)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.2)) for _ in range(2))
    return classified(Net(run, first=first, head=head, blocks=nn.ModuleList(blocks)), 8)


@replayed("the block runs twice with the same masks", notes="GAV301")
def checkpointed() -> Problem:
    return _checkpointed(False)


@replayed("the block runs twice with the same masks, by the older implementation", notes="GAV301")
def checkpointed_reentrant() -> Problem:
    return _checkpointed(True)


@replayed("one backward over all micro-batches repeats the draws of each", notes="GAV301", strategy="summed-loss")
def checkpointed_summed() -> Problem:
    return _checkpointed(False)


@replayed("a seed set inside the forward", notes="GAV301")
def seeded_forward() -> Problem:
    def seeded(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return F.dropout(x, 0.5)

    return noisy(seeded)


@replayed("a generator of the module's own", notes="GAV301")
def own_generator() -> Problem:
    def noise(net: Net, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=net.generator, dtype=x.dtype)

    one, other = (Net(noise, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    return classified(nn.Sequential(nn.Linear(8, 8), one, nn.Linear(8, 8), other, nn.Linear(8, 4)), 8)


@replayed("ragged micro-batches of 5, 5, 5 and 1, with dropout", weighting="samples", notes="GAV301")
def ragged_dropout() -> Problem:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    return Problem(model, cross_entropy, (torch.randn(16, 6), torch.randint(4, (16,))))


@replayed("dropout between the layers of a recurrent network", notes="GAV301")
def lstm_dropout() -> Problem:
    lstm, head = nn.LSTM(6, 5, num_layers=3, dropout=0.4, batch_first=True), nn.Linear(5, 1)
    model = Net(lambda net, x: net.head(net.lstm(x)[0][:, -1]), lstm=lstm, head=head)
    return Problem(model, squared_error, (torch.randn(8, 5, 6), torch.randn(8, 1)))


@replayed("dropout in bfloat16", dtype="bfloat16", notes="GAV301")
def low_precision_dropout() -> Problem:
    return noisy(nn.Dropout(0.5), nn.Dropout(0.5))


@replayed("two noisy views of every sample in one batch: samples are the inner index", notes="GAV301")
def two_views() -> Problem:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        one, other = model(torch.cat([batch, batch + 0.1 * torch.randn_like(batch)])).chunk(2)
        return -F.cosine_similarity(one, other).mean()

    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    return Problem(model, loss, torch.randn(16, 6))


@replayed("every sample three times, one copy of the batch after the other", notes="GAV301")
def repeated_inputs() -> Problem:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return Problem(model, lambda m, b: m(b.repeat(3, 1)).square().mean(), torch.randn(16, 6))


@replayed("every sample three times, side by side", notes="GAV301")
def interleaved_inputs() -> Problem:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return Problem(model, lambda m, b: m(b.repeat_interleave(3, 0)).square().mean(), torch.randn(16, 6))


@replayed("samples in the second dimension, noise samples in the first", notes="GAV301")
def importance_weighted() -> Problem:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(16, *batch.shape, dtype=batch.dtype)  # 16 draws of 16 samples
        return model(batch + noise).logsumexp(0).mean()

    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return Problem(model, loss, torch.randn(16, 6))


@replayed("one mask per sequence, samples second", notes="GAV301")
def variational_dropout() -> Problem:
    def recur(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        mask = x.new_empty(1, x.shape[1], x.shape[2]).bernoulli_(0.7) / 0.7
        return net.head(net.lstm(x * mask)[0][-1])

    return classified(Net(recur, lstm=nn.LSTM(6, 5), head=nn.Linear(5, 4)), 16, 6)


@replayed("a mask over a weight whose sides are as long as the batch")
def drop_connect() -> Problem:
    connect = Net(lambda net, x: x @ F.dropout(net.weight, 0.5), weight=nn.Parameter(torch.randn(16, 16)))
    return classified(nn.Sequential(connect, nn.Linear(16, 4)), 16)


class Graphs:
    """Node features, edges, and the graph that each node belongs to, as graph libraries batch them."""

    def __init__(self, nodes: torch.Tensor, edges: torch.Tensor, owner: torch.Tensor) -> None:
        self.nodes, self.edges, self.owner = nodes, edges, owner
        self.num_graphs = int(owner.max()) + 1


def _some_graphs(batch: Graphs, start: int, stop: int) -> Graphs:
    kept = (batch.owner >= start) & (batch.owner < stop)
    first = int(kept.nonzero()[0, 0])
    return Graphs(batch.nodes[kept], batch.edges[:, kept[batch.edges[0]]] - first, batch.owner[kept] - start)


def _graphs(sizes: tuple[int, ...]) -> Problem:
    def convolve(net: Net, graphs: Graphs) -> torch.Tensor:
        nodes = net.drop(net.first(graphs.nodes).relu())
        nodes = nodes + torch.zeros_like(nodes).index_add(0, graphs.edges[1], nodes[graphs.edges[0]])
        return net.last(nodes.new_zeros(graphs.num_graphs, 8).index_add(0, graphs.owner, nodes))

    model = Net(convolve, first=nn.Linear(6, 8), drop=nn.Dropout(0.4), last=nn.Linear(8, 1))
    owner = torch.tensor([graph for graph, size in enumerate(sizes) for _ in range(size)])
    edges = (owner[:, None] == owner).fill_diagonal_(False).nonzero().t()
    batch = Graphs(torch.randn(len(owner), 6), edges, owner)
    return Problem(model, lambda m, b: m(b).square().mean(), batch, split=_some_graphs)


@replayed("masks per node, graphs of different size", notes="GAV301")
def graph_nodes() -> Problem:
    return _graphs((3, 5, 2, 4, 1, 3, 4, 3))


@replayed("the same where the number of nodes is a multiple of the number of graphs", notes="GAV301")
def graph_nodes_thrice_the_graphs() -> Problem:
    return _graphs((3, 5, 2, 4, 1, 3, 4, 2))
