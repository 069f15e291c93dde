"""Look-alikes by where the samples lie in a draw: folded, second, inside a kernel, drawn twice, per node."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from problems import Net, classified, cross_entropy, squared_error
from problems_random import noisy, replayed
from torch import nn
from torch.utils.checkpoint import checkpoint

from gaverify import Problem


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
