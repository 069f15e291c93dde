"""`causal-lm`: a small language model of torch alone, on rows of different length.

Shapes: B rows, T tokens, W width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gaverify.errors import ProblemError
from gaverify.passes.batching import Problem
from gaverify.zoo import a_probability, at_least, divides, one_of

PADDING_TOKEN = 0


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a LayerNorm and added to what it read."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (B, T, W) for (B, T, W)."""
        attended = x + self.residual_dropout(self._attend(self.attention_norm(x)))
        result: torch.Tensor = attended + self.residual_dropout(self.feed_forward(self.feed_forward_norm(attended)))
        return result

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        # no padding mask: padding stands at the end of a row, where causal attention never looks
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        result: torch.Tensor = self.attention_out(attended.transpose(1, 2).flatten(2))
        return result


class CausalLM(nn.Module):
    """Predicts the next token; the head's weight is the token embedding's."""

    def __init__(self, vocab: int, width: int, depth: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        # GPT-2's initialisation (Radford et al., 2019): a head tied to a unit normal would start with huge logits
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits (B, T, V) for tokens (B, T)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class _NextTokenLoss:
    """Mean cross entropy over the targets that are not `ignore_index`."""

    def __init__(self, ignore_index: int) -> None:
        self.ignore_index = ignore_index

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=self.ignore_index)


def build(
    batch_size: int = 8,
    vocab: int = 64,
    width: int = 32,
    depth: int = 2,
    heads: int = 2,
    context: int = 32,
    dropout: float = 0.1,
    padding: str = "ignored",
    ignore_index: int = -100,
) -> Problem:
    """Returns a causal language model on random rows whose lengths rise from context/B to context.

    Args:
        batch_size: B.
        vocab: Number of tokens, the first of which is padding.
        width: The width of the residual stream.
        depth: Number of blocks.
        heads: The heads of each block; a divisor of `width`.
        context: Length of the longest row, to which the others are padded.
        dropout: The rate of the embeddings, the attention and both residual branches.
        padding: "ignored": its targets are `ignore_index`, so that each micro-batch's mean has its own number of
            targets; "counted": it is predicted like any token.
        ignore_index: The target that does not count.
    """
    at_least(1, width=width, depth=depth, context=context)
    at_least(2, vocab=vocab)
    divides(heads=heads, width=width)
    a_probability(dropout=dropout)
    one_of(("ignored", "counted"), padding=padding)
    if 0 <= ignore_index < vocab and (ignore_index != PADDING_TOKEN or padding == "counted"):
        raise ProblemError(f"--ignore-index {ignore_index} is a token; take one outside 0 to {vocab - 1}")
    batch = _ragged_rows(batch_size, vocab, context, ignore_index if padding == "ignored" else PADDING_TOKEN)
    model = CausalLM(vocab, width, depth, heads, context, dropout)
    return Problem(model, _NextTokenLoss(ignore_index), batch, name="causal-lm")


def _ragged_rows(batch_size: int, vocab: int, context: int, padding_target: int) -> dict[str, torch.Tensor]:
    """Returns rows of context·1/B, context·2/B, …, context tokens and, as labels, the token after each."""
    # One token more than the context: the last position predicts it.
    tokens = torch.randint(1, vocab, (batch_size, context + 1))
    lengths = torch.tensor([max(1, context * (row + 1) // batch_size) for row in range(batch_size)]).unsqueeze(1)
    place = torch.arange(context)
    return {
        "input_ids": tokens[:, :-1].masked_fill(place >= lengths, PADDING_TOKEN),
        "labels": tokens[:, 1:].masked_fill(place >= lengths, padding_target),
    }
