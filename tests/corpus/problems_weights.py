"""Faults B01 to B14 and L19: the loss is additive, but its micro-batches are weighted wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from problems import classified, fault, language_model, mlp, quiet, token_batch, token_loss
from torch import nn

from gaverify import Problem

RAGGED = (6, 5, 1, 2, 4, 3, 2, 1)  # micro-batches of two rows hold 11, 3, 7 and 3 of 24 valid tokens


def ragged_tokens() -> Problem:
    torch.manual_seed(0)
    return Problem(language_model(), token_loss, token_batch(RAGGED))


def even_tokens() -> Problem:
    """The same with two rows of every micro-batch holding 7 valid tokens together."""
    torch.manual_seed(0)
    return Problem(language_model(), token_loss, token_batch((6, 1, 2, 5, 4, 3, 3, 4)))


def mean_loss() -> Problem:
    torch.manual_seed(0)
    return classified(mlp(), 6)


def two_micro_batches() -> Problem:
    return classified(mlp(), 6, size=8)


class ForgetsTheCount(nn.Module):
    """Takes the token count that its trainer relies on; with `heeds`, it uses it as well."""

    def __init__(self, heeds: bool) -> None:
        super().__init__()
        self.inner, self.heeds = language_model(), heeds

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | None = None) -> Any:
        logits = self.inner(tokens).flatten(0, 1)
        if self.heeds and num_items_in_batch is not None:
            return {"loss": F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch}
        return {"loss": F.cross_entropy(logits, labels.flatten())}  # planted B06


def _counted(heeds: bool) -> Problem:
    torch.manual_seed(0)
    batch = token_batch((6,) * 8)
    return Problem(ForgetsTheCount(heeds), lambda model, batch: model(**batch, num_items_in_batch=48), batch)


def _windowed(other: int | None) -> Problem:
    """The summed loss over the valid tokens of a window; the micro-batches carry `other` as its count."""
    batch = token_batch(RAGGED)
    window: dict[str, Any] = {**batch, "items": float((batch["labels"] != -100).sum())}

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        logits = model(batch["tokens"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / batch["items"]

    def split(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        return {name: batch[name][start:stop] for name in ("tokens", "labels")} | {"items": other or batch["items"]}

    return Problem(language_model(), loss, window, split=split, batch_size=8)


def _matched(divided: bool) -> Problem:
    """Mean over the matched targets of an image, as a detector forms it, times the number of images."""
    matched = torch.zeros(16, 5)
    for row, count in enumerate((5, 4, 3, 5, 1, 1, 2, 1, 2, 3, 2, 2, 5, 5, 1, 1)):
        matched[row, :count] = 1

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, targets, matched = batch
        errors = (model(x) - targets).square() * matched
        return errors.sum() / 43 if divided else errors.sum() / matched.sum() * len(x)  # planted B11

    return Problem(mlp(classes=5), loss, (torch.randn(16, 6), torch.randn(16, 5), matched))


def _elements(loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Problem:
    """A loss of outputs, targets and a mask over their elements, of which later samples hold more and more."""
    mask = torch.rand(16, 4) < torch.linspace(0.2, 0.95, 16)[:, None]
    return Problem(mlp(), lambda model, b: loss(model(b[0]), *b[1:]), (torch.randn(16, 6), torch.randn(16, 4), mask))


def over_kinds() -> Problem:
    """A mean over the kinds that a batch holds: 4, and 2 in every micro-batch of this one, by chance."""
    kinds = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3, 0, 2, 0, 2, 1, 3, 1, 3])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, kinds = batch
        return (model(x) - y).square().mean() / len(kinds.unique())  # planted kinds

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randn(16, 4), kinds))


def normalised_sum(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Min-SNR weights, normalised over the batch: a rule that no two batches have the same numbers for."""
    weights = 1 / (1 + y[:, 0].exp())
    return (weights / weights.sum() * (x - y).square().mean(1)).sum()  # planted normalised-sum


def normalised_mean(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = 1 / (1 + y[:, 0].exp())
    return (weights / weights.mean() * (x - y).square().mean(1)).mean()  # planted normalised-mean


def hard_examples(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    errors = (x - y).square().mean(1)
    return errors[errors > 0.8].mean()  # planted hard-examples


def positives_and_elements(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Two terms with a count each, one of which depends on the outputs, and one over all rows, of shape (1,)."""
    errors, positive = (x - y).square(), x[:, 0] > -0.2
    found = (errors[:, 1:].sum(1) * positive).sum() / positive.sum().clamp(min=1)
    return (errors * mask).sum() / max(1, int(mask.sum())) + found + errors.mean(dim=0, keepdim=True).mean(1)


def constant_weights(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (1 / (1 + y[:, 0].exp()) * (x - y).square().mean(1)).mean()


def summed_beside_mean(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A reconstruction that is averaged and a divergence that is summed, as in many a VAE."""
    return (x - y).square().mean() + 0.1 * x.square().sum()  # planted summed-term


def averaged_beside_mean(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x - y).square().mean() + 0.01 * x.square().sum(1).mean()


def penalised(mean: bool = False) -> Problem:
    """Summed losses with a penalty on the parameters, which every micro-batch adds once more."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        errors = (model(batch[0]) - batch[1]).square()
        return (errors.mean() if mean else errors.sum()) + 0.1 * penalty  # planted penalty

    return replace(_elements(summed_beside_mean), loss=loss)


def sum_over_one_length() -> Problem:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["tokens"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / batch["labels"].shape[1]

    return Problem(language_model(), loss, token_batch((6,) * 8))


FAULTS = (
    fault("B01", ragged_tokens, "GAV202", "the mean of means weighs 3 tokens like 11"),
    fault("B02", mean_loss, "GAV201", "four means are added", weighting="none"),
    fault("B04", two_micro_batches, "GAV201", "two divided by the configured four", steps=2, weighting=(0.25, 0.25)),
    fault("B05", mean_loss, "GAV201", "divided by K twice", weighting=(1 / 16,) * 4),
    fault("B06", lambda: _counted(False), "GAV201", "the trainer leaves it to the model", weighting="none"),
    fault("B09", lambda: _windowed(36), "GAV201", "divided by another window's 36", weighting="none"),
    fault("B11", lambda: _matched(divided=False), "GAV202", "17, 5, 9 and 12 matched targets", weighting="none"),
    fault("B13", mean_loss, "GAV202", "6, 6 and 4 samples averaged equally", steps=3),
    fault("kinds", over_kinds, "GAV201", "a factor of this window stands for a count"),
    fault("normalised-sum", lambda: _elements(normalised_sum), "GAV202", "divided by its own weights"),
    fault("normalised-mean", lambda: _elements(normalised_mean), "GAV202", "the same by their mean"),
    fault("hard-examples", lambda: _elements(hard_examples), "GAV202", "a count that outputs decide"),
    fault("summed-term", lambda: _elements(summed_beside_mean), "GAV201", "one term is a sum"),
    fault("penalty", penalised, "GAV201", "counts K times", weighting="none"),
    fault("positives", lambda: _elements(positives_and_elements), "GAV202", "a count per term"),
    fault("B14", sum_over_one_length, "GAV201", "a sum over the batch is already additive; / K is once too often"),
    fault("L19", mean_loss, "GAV201", "`backward()` ran on the undivided loss", weighting="none"),
)

TWINS = (
    quiet("B01", ragged_tokens, "weighted by valid tokens", weighting="tokens"),
    quiet("B02", mean_loss, "divided by K"),
    quiet("B04", two_micro_batches, "divided by the two that there are", steps=2, weighting=(0.5, 0.5)),
    quiet("B05", mean_loss, "divided once", weighting=(1 / 4,) * 4),
    quiet("B06", lambda: _counted(True), "the model divides by the window's tokens", weighting="none"),
    quiet("B09", lambda: _windowed(None), "the window's own count", weighting="none"),
    quiet("B11", lambda: _matched(divided=True), "one constant divisor", weighting="none"),
    quiet("B13", mean_loss, "weighted n_k/N", steps=3, weighting="samples"),
    quiet("normalised-sum", lambda: _elements(constant_weights), "weights of the samples, not normalised"),
    quiet("summed-term", lambda: _elements(averaged_beside_mean), "both terms are means"),
    quiet("penalty", lambda: penalised(mean=True), "each micro-batch adds its share"),
    quiet("B14", sum_over_one_length, "not divided once more", weighting="none"),
)
