"""The rows N01 to N27 of `FAULTS.md` that need no training script: none of these may be flagged."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from problems import classified, cross_entropy, language_model, mlp, quiet, squared_error, token_batch, token_loss
from problems_coupling import image_batch_norm
from problems_weights import even_tokens, mean_loss, ragged_tokens
from torch import nn

from gaverify import Problem


class Pooled(nn.Module):
    """A transformer encoder over (B, T, D) sequences, pooled over time."""

    def __init__(self, dropout: float = 0.0, width: int = 8) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))


def transformer(dropout: float = 0.0) -> Problem:
    torch.manual_seed(0)
    return classified(Pooled(dropout), 5, 8, size=8)


class Windowed(nn.Module):
    """Swin-style: windows are folded into the batch, attended with a position bias, and unfolded."""

    def __init__(self, width: int = 8, window: int = 2) -> None:
        super().__init__()
        self.window = window
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, 4)
        self.bias = nn.Parameter(torch.randn(window**2, window**2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, channels = x.shape
        w = self.window
        folded = x.view(batch, height // w, w, width // w, w, channels).transpose(2, 3).reshape(-1, w * w, channels)
        q, k, v = self.qkv(self.norm(folded)).chunk(3, -1)
        attention = (q @ k.transpose(1, 2) / channels**0.5 + self.bias).softmax(-1)
        return self.out((attention @ v).reshape(batch, -1, channels).mean(1))


def swin_attention() -> Problem:
    return classified(Windowed(), 4, 4, 8, size=8)


class FrozenBatchNorm(nn.Module):
    """Constants in buffers, as detection models use it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.1), ("bias", 0.1), ("mean", 0.2), ("var", 1.3)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight * (self.var + 1e-5).rsqrt()
        return x * scale + (self.bias - self.mean * scale)


def frozen_batch_norm() -> Problem:
    return classified(nn.Sequential(nn.Linear(6, 8), FrozenBatchNorm(8), nn.ReLU(), nn.Linear(8, 4)), 6)


def summed() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    return replace(mean_loss(), loss=loss)


def tokens_of_the_window() -> Problem:
    """Token sums over all valid tokens of the window, which the batch carries as a plain number."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        logits = model(batch["tokens"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / batch["items"]

    return replace(ragged_tokens(), loss=loss, batch={**ragged_tokens().batch, "items": 24})


class Tied(nn.Module):
    """Embedding and output head share one weight."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embedding(tokens)).tanh())


def tied_weights() -> Problem:
    return Problem(Tied(), token_loss, token_batch((6,) * 8))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def deep(depth: int = 24) -> Problem:
    torch.manual_seed(0)
    return classified(nn.Sequential(*(Residual(8) for _ in range(depth)), nn.Linear(8, 4)), 8)


def deep_plain() -> Problem:
    """24 layers without residuals: rounding has to pass through every one of them."""
    layers = [layer for _ in range(24) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return classified(nn.Sequential(*layers, nn.Linear(8, 4)), 8)


def in_bfloat16() -> Problem:
    return Problem(mlp().bfloat16(), cross_entropy, (torch.randn(16, 6).bfloat16(), torch.randint(4, (16,))))


def dropout(*probabilities: float) -> Problem:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 8)]
    for probability in probabilities:
        layers += [nn.ReLU(), nn.Dropout(probability), nn.Linear(8, 8)]
    return classified(nn.Sequential(*layers, nn.Linear(8, 4)), 6)


def logged_four_times() -> Problem:
    """Only what the loss object logs is K times off."""

    def loss(model: nn.Module, batch: Any) -> SimpleNamespace:
        value = cross_entropy(model, batch)
        return SimpleNamespace(loss=value, logged=4 * value.detach())

    return replace(mean_loss(), loss=loss)


def in_another_order() -> Problem:
    """The micro-batches come last first."""
    order = [12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3]

    def split(batch: Any, start: int, stop: int) -> Any:
        return tuple(part[order[start:stop]] for part in batch)

    return replace(mean_loss(), split=split, batch_size=16)


def toy_linear() -> Problem:
    torch.manual_seed(0)
    return Problem(nn.Linear(16, 1), squared_error, (torch.randn(8, 16), torch.randn(8, 1)))


def causal_language_model() -> Problem:
    return Problem(language_model(), token_loss, token_batch((6,) * 8))


ROWS = (
    quiet("N01-transformer", transformer, "LayerNorm looks at one position", notes=""),
    quiet("N01-swin", swin_attention, "windows are folded into the batch, samples stay apart"),
    quiet("N03-eval", image_batch_norm, "running statistics are constants", mode="eval"),
    quiet("N03-frozen", frozen_batch_norm, "constants in buffers"),
    quiet("N04", summed, "a sum over the samples needs no division", weighting="none"),
    quiet("N06-samples", mean_loss, "6, 6 and 4 samples weighted n_k/N", steps=3, weighting="samples"),
    quiet("N06-tokens", tokens_of_the_window, "sums over all valid tokens", weighting="none"),
    quiet("N07", toy_linear, "a division after the loop is the same factor", weighting=(0.25,) * 4),
    quiet("N08", mean_loss, "losses summed, one backward", strategy="summed-loss"),
    quiet(
        "N08-dropout",
        lambda: dropout(0.5, 0.3),
        "losses summed, one backward, masks replayed",
        strategy="summed-loss",
    ),
    quiet("N10", tied_weights, "both uses add to one gradient"),
    quiet("N13", deep, "24 residual blocks in float32"),
    quiet("N13-plain", deep_plain, "24 layers in float32"),
    quiet("N14", in_bfloat16, "bfloat16 rounds 4e-3"),
    quiet("N14-deep", deep, "24 residual blocks in bfloat16", dtype="bfloat16"),
    quiet("N16-one", lambda: dropout(0.5), "one layer, masks replayed", notes="GAV301"),
    quiet("N16-two", lambda: dropout(0.5, 0.5), "two layers, masks replayed", notes="GAV301"),
    quiet("N16-three", lambda: dropout(0.1, 0.5, 0.9), "three layers, masks replayed", notes="GAV301"),
    quiet("N16-p0", lambda: dropout(0.0, 0.0), "p = 0"),
    quiet("N16-eval", lambda: dropout(0.5, 0.5), "eval mode", mode="eval"),
    quiet("N16-transformer", lambda: transformer(0.3), "attention draws as well", notes="GAV301"),
    quiet("N18", logged_four_times, "only the logged loss is off"),
    quiet("N19", mean_loss, "constant divisor K", weighting=lambda micro_batch: 0.25),
    quiet("N20", tokens_of_the_window, "already divided by the window's tokens", weighting=(1.0, 1.0, 1.0, 1.0)),
    quiet("N22", even_tokens, "equal counts: right on this batch only", notes="GAV901"),
    quiet("N27", in_another_order, "addition commutes but for rounding"),
    quiet("row-5", toy_linear, "squared error, B = 8, K = 4"),
    quiet("row-7-counted", causal_language_model, "every row has the same number of tokens"),
)
