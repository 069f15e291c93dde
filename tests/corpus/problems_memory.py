"""What a loss or a layer keeps in plain attributes, gradients that it clears, nodes that it lets meet.

Shapes: B = 16 samples of 6 features, embeddings of 4, a queue of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from problems import Problem, fault, quiet
from torch import nn


class Queue(nn.Module):
    """A ring of embeddings from earlier batches that serve as negatives.

    Args:
        inside: Whether the batch's own embeddings are negatives as well.
        moves: Whether the forward puts the batch into the ring; else the training loop does, once per update.
    """

    def __init__(self, *, inside: bool, moves: bool) -> None:
        super().__init__()
        self.inside, self.moves, self.head = inside, moves, 0
        self.bank = F.normalize(torch.randn(32, 4), dim=1)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        embeddings = F.normalize(embeddings, dim=1)
        earlier = embeddings @ self.bank.T / 0.2
        if self.inside:
            logits = torch.cat([embeddings @ embeddings.T / 0.2, earlier], 1)
            loss = F.cross_entropy(logits, torch.arange(len(embeddings)))
        else:
            loss = earlier.logsumexp(1).mean()
        if self.moves:
            places = (self.head + torch.arange(len(embeddings))) % len(self.bank)
            self.bank = self.bank.index_copy(0, places, embeddings.detach())  # planted queue-moves
            self.head = (self.head + len(embeddings)) % len(self.bank)
        return loss


class Scale(nn.Module):
    """Divides by a deviation: of the first batch that comes, or given from the start."""

    def __init__(self, scale: torch.Tensor | None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.detach().std(0) + 1e-3  # planted scale-set
        return x / self.scale


class Membrane(nn.Module):
    """A neuron's potential over three steps of time, with a row per sample: kept for the next batch, or begun anew."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.anew = anew
        self.register_buffer("potential", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.anew or self.potential.shape != x.shape:
            self.potential = torch.zeros_like(x)
        for _ in range(3):
            self.potential = 0.9 * self.potential.detach() + x  # planted membrane
        return torch.sigmoid(4 * (self.potential - 1))


def _embedding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 6), torch.randint(3, (16,))


def _queued(*, inside: bool, moves: bool) -> Problem:
    model, criterion = _embedding(), Queue(inside=inside, moves=moves)
    return Problem(model, lambda model, b: criterion(model(b[0])), _batch())


def _scaled(scale: torch.Tensor | None) -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Scale(scale), nn.Tanh(), nn.Linear(8, 3))
    return Problem(model, lambda model, b: F.cross_entropy(model(b[0]), b[1]), _batch())


def _spiking(anew: bool) -> Problem:
    model = nn.Sequential(nn.Linear(6, 8), Membrane(anew), nn.Linear(8, 3))
    return Problem(model, lambda model, b: F.cross_entropy(model(b[0]), b[1]), _batch())


def _clearing(clear: Callable[[nn.Module], Any]) -> Problem:
    model = _embedding()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        clear(model)
        return F.cross_entropy(output, batch[1])

    return Problem(model, loss, _batch())


def _set_to_none(model: nn.Module) -> None:
    model.zero_grad()  # planted cleared


def _filled_with_zeros(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()  # planted zeroed


def clears() -> Problem:
    return _clearing(_set_to_none)


def clears_another() -> Problem:
    critic = nn.Linear(4, 1)
    return _clearing(lambda _: critic.zero_grad())


class Cached(nn.Module):
    """A loss that runs the model without a graph first, and once more in its backward, `part` samples at a time."""

    def __init__(self, model: nn.Module, part: int, *, pairs: bool) -> None:
        super().__init__()
        self.model, self.part, self.pairs = model, part, pairs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(self.part)
        with torch.no_grad():
            found = [self.model(part) for part in parts]
        leaves = [output.requires_grad_() for output in found]
        rows = F.normalize(torch.cat(leaves), dim=1)
        targets = torch.arange(len(rows))
        scores = rows @ rows.roll(1, 1).T / 0.2 if self.pairs else rows  # planted own-cache
        loss = F.cross_entropy(scores, targets if self.pairs else targets % 4)
        gradients = torch.autograd.grad(loss, leaves)

        def replay(weight: torch.Tensor) -> None:
            with torch.enable_grad():
                for part, gradient in zip(parts, gradients, strict=True):
                    (self.model(part) * gradient * weight).sum().backward()

        loss = loss.detach().requires_grad_()
        loss.register_hook(replay)
        return loss


def _caching(*, part: int, pairs: bool) -> Problem:
    model = _embedding()
    criterion = Cached(model, part, pairs=pairs)
    return Problem(model, lambda model, x: criterion(x), torch.randn(16, 6))


def _of_nodes(pairs: Callable[[torch.Tensor, list[int]], torch.Tensor]) -> Problem:
    """Graphs of 4 to 6 nodes, packed one behind the other; the loss is a mean over nodes, and over pairs of them."""
    model = _embedding()
    graphs = [torch.randn(4 + i % 3, 6) for i in range(12)]

    def loss(model: nn.Module, graphs: Any) -> torch.Tensor:
        counts = [len(graph) for graph in graphs]
        return pairs(F.normalize(model(torch.cat(graphs)), dim=1), counts)

    return Problem(model, loss, graphs, split=lambda batch, start, stop: batch[start:stop], batch_size=12)


def _all_pairs(nodes: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return (nodes @ nodes.T / 0.2).logsumexp(1).sum() / len(counts)  # planted node-pairs


def _pairs_of_a_graph(nodes: torch.Tensor, counts: list[int]) -> torch.Tensor:
    parts = nodes.split(counts)
    return sum((part @ part.T / 0.2).logsumexp(1).sum() for part in parts) / len(counts)


FAULTS = (
    fault("own-cache", lambda: _caching(part=32, pairs=True), "GAV103", "handed a micro-batch it caches that alone"),
    fault("own-cache-of-parts", lambda: _caching(part=2, pairs=True), "GAV103", "the same in smaller parts"),
    fault("node-pairs", lambda: _of_nodes(_all_pairs), "GAV103", "nodes meet those of other graphs"),
    fault(
        "queue-moves",
        lambda: _queued(inside=False, moves=True),
        "GAV403",
        "later micro-batches meet the earlier ones",
    ),
    fault("scale-set", lambda: _scaled(None), "GAV401", "the first micro-batch sets the scale"),
    fault("membrane", lambda: _spiking(False), "GAV401", "the second micro-batch goes on from the first's"),
    fault("cleared", clears, "GAV603", "each forward throws earlier gradients away"),
    fault("zeroed", lambda: _clearing(_filled_with_zeros), "GAV603", "zeros are written over earlier gradients"),
)
TWINS = (
    quiet("own-cache-alone", lambda: _caching(part=32, pairs=False), "a mean over samples, however its gradient comes"),
    quiet("node-pairs-within", lambda: _of_nodes(_pairs_of_a_graph), "nodes meet those of their own graph"),
    quiet(
        "queue-still",
        lambda: _queued(inside=False, moves=False),
        "a queue that the loop moves is a constant of the window",
    ),
    quiet("membrane-anew", lambda: _spiking(True), "a state that begins anew with every batch"),
    quiet("scale-given", lambda: _scaled(torch.ones(8)), "a scale that is there from the start is a constant"),
    quiet("cleared-elsewhere", clears_another, "the gradients of another model are none of this one's"),
)
COMBINED = (
    fault(
        "queue-and-negatives",
        lambda: _queued(inside=True, moves=True),
        "GAV103 GAV403",
        "negatives, and a queue that moves",
    ),
)
