"""Healthy models as people have them, and faulty twins: whose draws lie anywhere but in the batch's order.

Some have batches that cannot be sliced, or draws that torch does not make. Shapes: B = 8 or 16 samples of 6 features
(or up to 7 tokens) in 4 micro-batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from problems import Case, Net, Parts, classified, cross_entropy, listed, mlp, quiet
from torch import nn
from torch.utils.checkpoint import checkpoint

from gaverify import Problem

ARCHITECTURES: list[Case] = []
FAULTY: list[Case] = []
LENGTHS = (3, 5, 3, 4, 2, 2, 7, 3)
healthy = listed(ARCHITECTURES, notes="GAV301")
faulty = listed(FAULTY)


def dropping(*parts: nn.Module) -> nn.Sequential:
    """Linear layers with two dropouts, `parts` behind the first."""
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), *parts, nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


class Tagger(nn.Module):
    """Two recurrent layers over sequences packed by length, with dropout between them."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.recurrent = kind(8, 8, 2, dropout=0.3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        pack, pad = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence
        packed = pack(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad(self.recurrent(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.head(out)


def _tagging(kind: type[nn.RNNBase]) -> Problem:
    lengths = torch.tensor([5, 3, 7, 2, 7, 4, 6, 1])
    tokens, tags = torch.randint(1, 20, (8, 7)), torch.randint(5, (8, 7))
    padding = torch.arange(7)[None] >= lengths[:, None]
    tokens[padding], tags[padding] = 0, -100

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["tokens"], batch["lengths"]).flatten(0, 1), batch["tags"].flatten())

    return Problem(Tagger(kind), loss, {"tokens": tokens, "lengths": lengths, "tags": tags})


@healthy("the rows between the layers lie by time step and length", weighting="tokens")
def packed_lstm_with_dropout() -> Problem:
    return _tagging(nn.LSTM)


@healthy("in bfloat16 rows are recognised to 8 bits", weighting="tokens", dtype="bfloat16")
def packed_gru_in_bfloat16() -> Problem:
    return _tagging(nn.GRU)


@faulty("the same tagger under uniform weights", "GAV202")
def packed_rnn_under_uniform_weights() -> Problem:
    return _tagging(nn.RNN)


@healthy("TorchScript draws a mask on its own first, and by a fused dropout once it has seen the shapes")
def scripted_dropout() -> Problem:
    problem = classified(dropping(), 6)
    problem.model = torch.jit.script(problem.model)
    return problem


@healthy("a traced model")
def traced_dropout() -> Problem:
    problem = classified(dropping(), 6)
    problem.model = torch.jit.trace(problem.model, torch.randn(4, 6), check_trace=False)
    return problem


def _looped(forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        losses = [F.cross_entropy(forward(model, x), y.expand(len(x))) for x, y in zip(*batch, strict=True)]
        return torch.stack(losses).mean()

    return Problem(dropping(), loss, ([torch.randn(size, 6) for size in LENGTHS], torch.randint(4, (8,))))


@healthy("a forward per sample: the i-th sample's draws are the i-th")
def loop_over_samples() -> Problem:
    return _looped(lambda model, x: model(x))


@healthy("a checkpointed forward per sample: each draws again in the backward")
def loop_over_checkpointed_samples() -> Problem:
    return _looped(lambda model, x: checkpoint(model, x, use_reentrant=False))


@healthy("samples of one shape: nothing but the order tells whose draw it is")
def loop_over_equal_samples() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        losses = [F.cross_entropy(model(x)[None], y[None]) for x, y in zip(*batch, strict=True)]
        return torch.stack(losses).mean()

    return Problem(dropping(), loss, (torch.randn(8, 6), torch.randint(4, (8,))))


@healthy("a loop over layers around a loop over samples, in one line of code")
def layers_around_samples() -> Problem:
    def loss(model: nn.ModuleList, batch: Any) -> torch.Tensor:
        rows, classes = batch
        for layer in model:
            rows = [F.dropout(layer(x), 0.3) for x in rows]
        return torch.stack([F.cross_entropy(x, y.expand(len(x))) for x, y in zip(rows, classes, strict=True)]).mean()

    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)])
    return Problem(model, loss, ([torch.randn(size, 6) for size in LENGTHS], torch.randint(4, (8,))))


@healthy("a permutation of each image's own candidates, as detectors draw them")
def sampled_candidates() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        losses = []
        for x, y in zip(*batch, strict=True):
            found = [(y == kind).nonzero().flatten() for kind in (0, 1)]
            kept = torch.cat([rows[torch.randperm(len(rows))[:2]] for rows in found])
            losses.append(F.cross_entropy(model(x[kept]), y[kept]))
        return torch.stack(losses).mean()

    sizes = (9, 8, 7, 6, 9, 8, 7, 6)
    batch = [torch.randn(size, 6) for size in sizes], [torch.arange(size) % 2 for size in sizes]
    return Problem(nn.Linear(6, 2), loss, batch)


class Experts(nn.Module):
    """Each token goes to one expert; an expert that gets none does not run."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.gate, self.head, self.inside = nn.Linear(6, 3), nn.Linear(6, 4), inside
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3 * inside)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                mixed = expert(x[rows]) if self.inside else F.dropout(expert(x[rows]), 0.3)
                out = out.index_add(0, rows, share[rows, None] * mixed)
        return self.head(F.dropout(x + out, 0.2))


@healthy("an expert's dropout draws for the tokens that it was sent, or not at all")
def experts_with_dropout() -> Problem:
    return classified(Experts(inside=True), 6)


@healthy("the same in one line of code for all experts")
def dropout_behind_experts() -> Problem:
    return classified(Experts(inside=False), 6)


def _rows_dropped(drop: Callable[[torch.Tensor], torch.Tensor]) -> Problem:
    model = Net(lambda net, x: net.head(drop(net.first(x))), first=nn.Linear(6, 8), head=nn.Linear(8, 4))
    return classified(model, 6)


@healthy("rows sorted by their values before the dropout, and sorted back")
def sorted_rows() -> Problem:
    def drop(x: torch.Tensor) -> torch.Tensor:
        order = x[:, 0].argsort()
        return F.dropout(x[order], 0.3)[order.argsort()]

    return _rows_dropped(drop)


@healthy("dropout in two halves of the (micro-)batch: a micro-batch's halves both lie in one half of the batch")
def halved_batch() -> Problem:
    return _rows_dropped(lambda x: torch.cat([F.dropout(half, 0.3) for half in x.chunk(2)]))


@healthy("a forward in chunks of a fixed size")
def chunked_batch() -> Problem:
    return _rows_dropped(lambda x: torch.cat([F.dropout(part, 0.3) for part in x.split(4)]))


@healthy("micro-batches of the batch's samples in another order")
def shuffled_micro_batches() -> Problem:
    order = [11, 3, 7, 15, 0, 1, 2, 14, 13, 12, 4, 5, 6, 8, 9, 10]
    problem = classified(dropping(), 6)
    problem.split = lambda batch, start, stop: tuple(part[order[start:stop]] for part in batch)
    return problem


@healthy("two ways of folding the draws of a repeated batch, in one forward")
def folded_both_ways() -> Problem:
    def repeat(x: torch.Tensor) -> torch.Tensor:
        outside = x.repeat(3, 1)
        outside = outside + torch.randn_like(outside)
        inside = outside.unflatten(0, (3, -1)).transpose(0, 1).flatten(0, 1)
        return (inside + torch.randn_like(inside)).unflatten(0, (-1, 3)).mean(1)

    return _rows_dropped(repeat)


@healthy("edges of graphs in any order, and a mask per edge", batch_size=8)
def masked_edges() -> Problem:
    sizes = torch.tensor([3, 5, 2, 4, 6, 3, 4, 2])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    graphs = [torch.randint(int(a), int(b), (2, 6)) for a, b in pairwise(ends)]
    edges = torch.cat(graphs, 1)[:, torch.randperm(48)]

    def passing(net: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nodes, (source, target) = net.first(batch["nodes"]), batch["edges"]
        weight = net.score(torch.cat([nodes[source], nodes[target]], 1)).exp().squeeze(1)
        message = F.dropout(weight, 0.3)[:, None] * nodes[source]
        nodes = nodes + torch.zeros_like(nodes).index_add(0, target, message)
        pooled = torch.zeros(len(batch["classes"]), 8, dtype=nodes.dtype)
        return net.head(pooled.index_add(0, batch["graph"], F.dropout(nodes, 0.1)))

    def split(batch: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
        first, last = int(ends[start]), int(ends[stop])
        own = (batch["edges"][0] >= first) & (batch["edges"][0] < last)
        return {
            "nodes": batch["nodes"][first:last],
            "edges": batch["edges"][:, own] - first,
            "graph": batch["graph"][first:last] - start,
            "classes": batch["classes"][start:stop],
        }

    batch = {
        "nodes": torch.randn(int(sizes.sum()), 6),
        "edges": edges,
        "classes": torch.randint(4, (8,)),
        "graph": torch.repeat_interleave(torch.arange(8), sizes),
    }
    model = Net(passing, first=nn.Linear(6, 8), score=nn.Linear(16, 1), head=nn.Linear(8, 4))
    return Problem(model, lambda model, part: F.cross_entropy(model(part), part["classes"]), batch, split)


@healthy("an activation that draws and overwrites its input")
def randomised_relu_in_place() -> Problem:
    return classified(nn.Sequential(nn.Linear(6, 8), nn.RReLU(inplace=True), nn.Linear(8, 4)), 6)


@faulty("dropout behind a BatchNorm: the rows really differ, and are not looked for elsewhere", "GAV101")
def dropout_behind_batch_norm() -> Problem:
    return classified(dropping(nn.BatchNorm1d(8)), 6)


@faulty("partners from the other end of the batch, dropout in the model", "GAV103")
def mixed_pairs_with_dropout() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return cross_entropy(model, (0.3 * x + 0.7 * x.flip(0), y))

    return Problem(dropping(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


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


class InnerFloat32(Parts):
    """Normalises in float32, whatever it is given, as language models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.first(x), 0.2).float()
        return self.head((hidden * torch.exp(-hidden.pow(2).cumsum(1))).to(x.dtype))


@healthy("float32 rounding inside a model that was asked for in float64", dtype="float64")
def float32_inside_float64() -> Problem:
    return classified(InnerFloat32(first=nn.Linear(6, 8), head=nn.Linear(8, 4)), 6)


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


@faulty("a permutation of the full batch cannot be cut into those of micro-batches", "GAV302")
def numpy_permutation() -> Problem:
    return _noised(lambda n: numpy.random.permutation(n))
