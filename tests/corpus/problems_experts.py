"""Mixtures of experts: tokens sorted by their expert, balancing losses, capacity over the tokens of a batch.

Shapes: B = 16 sentences of T = 5 tokens, width 8, E = 4 experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from problems import Problem, fault, quiet
from torch import nn

EXPERTS, WIDTH = 4, 8


class Experts(nn.Module):
    """Sends every token to its best two experts.

    Args:
        how: "sorted" computes the tokens of one expert after another, each once per expert; "grouped" in one fused
            product; "loop" picks each expert's tokens out; "capacity" gives every expert as many tokens as its share.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        share, chosen = logits.softmax(-1).topk(2)
        mixed = getattr(self, self.how)(tokens, share, chosen)
        return mixed.view_as(x), logits

    def sorted(self, tokens: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // 2] * share.flatten()[order, None]
        ends = chosen.flatten().bincount(minlength=EXPERTS).cumsum(0).tolist()
        parts = [rows[start:stop] @ w for start, stop, w in zip([0, *ends], ends, self.weight, strict=False)]
        return torch.zeros_like(tokens).index_add(0, order // 2, torch.cat(parts))

    def grouped(self, tokens: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=EXPERTS).cumsum(0).int()
        rows = F.grouped_mm(tokens[order // 2], self.weight, offs=ends) * share.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return rows[back].view(len(tokens), 2, -1).sum(1)

    def loop(self, tokens: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, token, tokens[token] @ self.weight[expert] * share[token, slot, None])
        return mixed

    def capacity(self, tokens: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        best = F.one_hot(chosen[:, 0], EXPERTS)
        place = best.cumsum(0) * best  # here lies capacity, which is told by its module or by the loss alone
        kept = (place * (place <= len(tokens) // EXPERTS)).sum(1) > 0
        gathered = self.weight[chosen[:, 0]]
        return torch.einsum("td,tde->te", tokens, gathered) * share[:, :1] * kept[:, None]


class Queued(nn.Module):
    """A block of experts that take a token's first and second choice while there is room: the router of NLLB-MoE."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        first = F.one_hot(logits.argmax(-1), EXPERTS)
        second = F.one_hot(logits.masked_fill(first.bool(), float("-inf")).argmax(-1), EXPERTS)
        place = second.cumsum(0) - 1 + first.sum(0)
        first = first * torch.lt(first.cumsum(0) - 1, self.room)  # planted expert-queue
        second = second * torch.lt(place, self.room)
        share = logits.softmax(-1) * (first + second)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token = share[:, number].nonzero().squeeze(1)
            mixed = mixed.index_add(0, token, self.dropout(expert(tokens[token])) * share[token, number, None])
        return x + mixed.view_as(x), logits


class Queues(nn.Module):
    """Two blocks with queues; the balancing loss is a small part of the loss."""

    def __init__(self, room: int, balance: float) -> None:
        super().__init__()
        self.balance = balance
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.blocks = nn.ModuleList([Queued(room), Queued(room)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, balance = self.embed(ids), 0.0
        for block in self.blocks:
            x, logits = block(x)
            used = F.one_hot(logits.argmax(-1), EXPERTS).to(logits.dtype).mean(0)
            balance = balance + EXPERTS * (used * logits.softmax(-1).mean(0)).sum()  # planted queue-balance
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + self.balance * balance


class Balanced(nn.Module):
    """A language model with experts; `balance` is the weight of the loss that wants all experts used alike."""

    def __init__(self, how: str, balance: float) -> None:
        super().__init__()
        self.balance = balance
        self.embed, self.experts, self.head = nn.Embedding(11, WIDTH), Experts(how), nn.Linear(WIDTH, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        mixed, logits = self.experts(x)
        loss = F.cross_entropy(self.head(x + mixed).flatten(0, 1), labels.flatten())
        if self.balance:
            used = F.one_hot(logits.topk(2).indices, EXPERTS).sum(1).to(logits.dtype).mean(0)
            loss = loss + self.balance * EXPERTS * (used * logits.softmax(-1).mean(0)).sum()  # planted balance
        return {"loss": loss}


def _sentences(how: str, balance: float) -> Problem:
    batch = torch.randint(11, (16, 5)), torch.randint(11, (16, 5))
    return Problem(Balanced(how, balance), lambda model, b: model(*b), batch)


def _queues(room: int, balance: float) -> Problem:
    batch = torch.randint(11, (16, 5)), torch.randint(11, (16, 5))
    return Problem(Queues(room, balance), lambda model, b: model(*b), batch)


def queues() -> Problem:
    return _queues(15, 0.0)


_ONLY = "experts without a capacity mix nothing; the balancing loss multiplies two means over the batch"
_QUEUE = "whether a token finds room hangs on the tokens before it, in both blocks; dropout masks follow the tokens"
FAULTS = (
    fault("expert-queue", queues, "GAV102", _QUEUE),
    fault("balance", lambda: _sentences("sorted", 0.1), "GAV103", _ONLY),
    fault("balance", lambda: _sentences("grouped", 0.1), "GAV103", _ONLY),
    fault("balance", lambda: _sentences("loop", 0.1), "GAV103", _ONLY),
    fault(
        "capacity",
        lambda: _sentences("capacity", 0.0),
        "GAV102",
        "a token's place in a queue hangs on the batch",
        module="experts",
    ),
)
TWINS = (
    quiet("queues", lambda: _queues(80, 0.0), "every token finds room, and dropout masks follow their tokens"),
    quiet("sorted-experts", lambda: _sentences("sorted", 0.0), "sorting by their expert changes their order alone"),
    quiet("grouped-experts", lambda: _sentences("grouped", 0.0), "a fused product by groups changes nothing"),
    quiet("looped-experts", lambda: _sentences("loop", 0.0), "each expert sees its own tokens"),
)
COMBINED = (
    fault("queue-balance", lambda: _queues(15, 1e-3), "GAV102 GAV103", _QUEUE),
    fault(
        "capacity-and-balance",
        lambda: _sentences("capacity", 0.1),
        "GAV102 GAV103",
        "the queue, and the balancing loss",
    ),
)
