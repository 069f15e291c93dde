"""Faults that no row of `FAULTS.md` names, as user code would have them, with twins; and several faults at once.

Shapes: B = 16 samples of D = 6 features; sequences of T = 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from problems import (
    Parts,
    Problem,
    classified,
    cross_entropy,
    fault,
    language_model,
    mlp,
    quiet,
    token_batch,
    token_loss,
)
from torch import nn

RAGGED = (6, 2, 5, 3, 6, 6, 1, 4, 2, 3, 6, 5, 4, 1, 2, 6)


class Body(nn.Module):
    """Linear, a step of the subclass, Linear."""

    def __init__(self, healthy: bool = False) -> None:
        super().__init__()
        self.healthy = healthy
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.between(self.inner(x)))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def body(kind: type[Body], healthy: bool, *shape: int) -> Problem:
    torch.manual_seed(0)
    return classified(kind(healthy), *(shape or (6,)))


class Whitening(Body):
    """Decorrelates the features by the covariance of the batch."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.healthy:
            return h
        centred = h - h.mean(0)  # planted whitening
        covariance = centred.T @ centred / (len(h) - 1) + 1e-3 * torch.eye(8, dtype=h.dtype)
        return centred @ torch.linalg.cholesky(torch.linalg.inv(covariance))


class AttentionOverBatch(Body):
    """Samples attend to each other."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(h @ (h.mT if not self.healthy else h.mT.diag_embed().sum(-1)), -1)  # planted attention
        return weights @ h if not self.healthy else h * weights[..., :1]


class FusedAttentionOverBatch(Body):
    """Samples attend to each other in a fused kernel, which could draw a dropout mask and draws none."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        heads = h.reshape(-1, 1, 2, 4) if self.healthy else h.reshape(1, 1, -1, 8)
        return F.scaled_dot_product_attention(heads, heads, heads).reshape(h.shape)  # planted fused-attention


class TopOfBatch(Body):
    """Keeps the strongest activations of the whole batch, three per sample on average (BatchTopK)."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.healthy:
            return h * (h >= h.topk(3, dim=1).values[:, -1:])
        threshold = h.flatten().topk(3 * len(h)).values[-1]  # planted batch-top-k
        return h * (h >= threshold)


class Packed(Body):
    """A synchronised normalisation: sums, squares and the count packed into one tensor."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.healthy:
            return F.layer_norm(h, (8,))
        packed = torch.cat([h.sum(0), h.square().sum(0), h.new_tensor([len(h)])])  # planted packed-sums
        mean, square = packed[:8] / packed[-1], packed[8:16] / packed[-1]
        return (h - mean) * torch.rsqrt(square - mean * mean + 1e-5)


class Branching(Body):
    """Doubles the features where the batch's mean is above a threshold."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.healthy:
            return torch.where(h.mean(1, keepdim=True) > 0, 2 * h, h)
        if h.mean() > 0.065:  # planted data-dependent-branch
            h = h * 2
        return h


class Logging(Body):
    """Halves the features of a batch of more than two; reads a number that decides nothing before."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.largest = h.max().item()
        if self.healthy or h.shape[0] > 2:
            h = h * 0.5  # planted branch-on-size
        return h


class Masked(nn.Module):
    """Two layers that mask the padding, each at two places; the faulty ones skip it for a batch of one text."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.healthy = nn.Embedding(30, 8), nn.Linear(8, 30), healthy
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def mask(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.healthy or mask.shape[0] > 1:
            x = x * mask[:, :, None]  # planted mask-of-one-text
        return x

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = self.mask(x, mask)
            x = x + self.mask(torch.tanh(layer(x)), mask).cumsum(1) * torch.sigmoid(gate(x))
        return self.head(x)


def _masked(healthy: bool) -> Problem:
    torch.manual_seed(0)
    tokens = torch.randint(1, 30, (6, 9)) * (torch.arange(9) >= torch.tensor([0, 3, 5, 2, 4, 1])[:, None])
    return Problem(
        Masked(healthy),
        lambda model, batch: F.cross_entropy(model(*batch)[:, -4:-1].flatten(0, 1), batch[0][:, -3:].flatten()),
        (tokens, (tokens > 0).float()),
    )


class PerSampleLoop(Body):
    """Treats samples one by one; the faulty one compares each with the batch's mean."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        centre = torch.zeros(8, dtype=h.dtype) if self.healthy else h.mean(0)  # planted loop-in-the-model
        return torch.stack([2 * row if row.sum() > 0 else row - centre for row in h])


class Recurrent(Parts):
    """An LSTM fed (batch, time, features): without `batch_first` the samples are its time steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.recurrent(x)[0][:, -1])


class Factor(Body):
    """Reverses gradients by a factor; the faulty one reads it off the activations of the batch."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        factor = 0.5 if self.healthy else float(h.detach().abs().mean())  # planted reversal-factor
        return Reversed.apply(h, factor)


class Reversed(torch.autograd.Function):
    """Identity whose backward multiplies by −factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.factor * gradient, None


class HookInside(Body):
    """The forward puts a gradient hook on its own activations."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        h = h.tanh()
        h.register_hook(lambda g: 0.5 * g if self.healthy else g / g.abs().max())  # planted hook-inside
        return h


def hook_on_module(healthy: bool) -> Problem:
    model = mlp()
    model[2].register_full_backward_hook(lambda _, inputs, __: (inputs[0] / (1.0 if healthy else inputs[0].norm()),))
    return classified(model, 6)


class Warming(nn.Module):
    """Grows its output over ten forwards, counted in a Python attribute."""

    def __init__(self, inner: nn.Module, healthy: bool = False) -> None:
        super().__init__()
        self.inner, self.healthy, self.calls = inner, healthy, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # planted warm-up
        return self.inner(x) * (1.0 if self.healthy else min(1.0, self.calls / 10))


def spectral() -> Problem:
    """The module before parametrisations: a forward moves two buffers and keeps the weight it computed."""
    torch.manual_seed(0)
    return classified(nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 4)), 6)


def under(loss: Any, model: nn.Module | None = None, size: int = 16) -> Problem:
    torch.manual_seed(0)
    return Problem(model or mlp(), loss, (torch.randn(size, 6), torch.randint(4, (size,))))


def regression(loss: Any) -> Problem:
    return Problem(mlp(classes=1), loss, (torch.randn(16, 6), torch.randn(16, 1)))


def worst_group(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    groups = [losses[batch[1] == group].mean() for group in range(4) if bool((batch[1] == group).any())]
    return torch.stack(groups).max()


def largest_error(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).abs().max()


def hardest_half(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.topk(len(losses) // 2).values.mean()  # planted hardest-half


def above_threshold(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * (losses > 1.3)).mean()


def halved_when_large(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = F.mse_loss(model(batch[0]), batch[1])
    if loss.item() > 1.2:  # planted branch-in-loss
        loss = 0.5 * loss
    return loss


def own_scale(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss / loss.detach()  # planted own-scale


def loop_over_pairs(model: nn.Module, batch: Any) -> torch.Tensor:
    z, total = model(batch[0]), torch.zeros(())
    for i in range(len(z)):
        for j in range(i + 1, len(z)):
            total = total + F.softplus(-(z[i] - z[j]).square().sum())  # planted loop-over-pairs
    return total / (len(z) * (len(z) - 1) / 2)


def loop_over_samples(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = [F.cross_entropy(model(x[None]), y[None]) for x, y in zip(*batch, strict=True)]
    return sum(losses[1:], losses[0]) / len(losses)


def gradient_penalty(model: nn.Module, batch: Any, whole: bool) -> torch.Tensor:
    x = batch[0].clone().requires_grad_()
    logits = model(x)
    (slope,) = torch.autograd.grad(logits[:, 0].sum(), x, create_graph=True)
    norms = slope.norm() if whole else slope.norm(dim=1)  # planted gradient-penalty
    return F.cross_entropy(logits, batch[1]) + (norms - 1).square().mean()


def diagonal_only(model: nn.Module, batch: Any) -> torch.Tensor:
    """The matrix of all pairs is computed, and only a sample's own entry used."""
    z = model(batch[0])
    return -F.logsigmoid(torch.diagonal(z @ z.T)).mean()


def pasted(model: nn.Module, batch: Any) -> torch.Tensor:
    """CutMix by hand: half of the features, and the label, of the sample at the other end of the batch."""
    x, y = batch
    partner = torch.arange(len(x) - 1, -1, -1)
    x = torch.cat([x[:, :3], x[partner][:, 3:]], 1)  # planted pasted
    logits = model(x)
    return 0.5 * F.cross_entropy(logits, y) + 0.5 * F.cross_entropy(logits, y[partner])


def _recurrent(healthy: bool) -> Problem:
    return classified(Recurrent(recurrent=nn.LSTM(6, 8, batch_first=healthy), outer=nn.Linear(8, 4)), 5, 6)


def _attention(healthy: bool) -> Problem:
    return body(AttentionOverBatch, healthy)


def _fused_attention(healthy: bool) -> Problem:
    return body(FusedAttentionOverBatch, healthy)


def _normed(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), *between, nn.Linear(8, 4))


def _in_batch(model: nn.Module, batch: Any) -> torch.Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(5 * z @ z.roll(1, 1).T, torch.arange(len(z)))


def _tokens(model: nn.Module) -> Problem:
    torch.manual_seed(0)
    return Problem(model, token_loss, token_batch(RAGGED))


class TokenNorm(nn.Module):
    """An embedding, a BatchNorm over the positions, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(11, 8), nn.BatchNorm1d(6), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


class Sparse(nn.Module):
    """Top-1 routing: an expert that no sample of a micro-batch chooses has no gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, choice = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return out


def sparse() -> Problem:
    torch.manual_seed(7)
    return under(cross_entropy, Sparse())


class TwoMixtures(nn.Module):
    """A softmax over the batch, and a mean over the batch later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        h = 8 * h * F.softmax(h, 0)
        h = self.second(h).tanh()
        return self.last(h + h.mean(0))


class Renorm(nn.Module):
    """Batch renormalisation by hand: statistics of the batch, corrected by running ones that the forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, scale = x.mean(0), x.std(0, unbiased=False) + 1e-5
        r, d = scale.detach() / self.scale, (mean.detach() - self.mean) / self.scale
        with torch.no_grad():
            self.mean += 0.1 * (mean - self.mean)
            self.scale += 0.1 * (scale - self.scale)
        return (x - mean) / scale * r + d


def renorm() -> Problem:
    torch.manual_seed(0)
    return classified(nn.Sequential(nn.Linear(6, 8), Renorm(), nn.ReLU(), nn.Linear(8, 4)), 6)


def _hooked() -> Problem:
    problem = under(cross_entropy)
    problem.model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    return problem


_COUPLED = "GAV101 GAV102"
FAULTS = (
    fault("whitening", lambda: body(Whitening, False), _COUPLED, "centred, then decorrelated: two reductions"),
    fault("attention", lambda: _attention(False), "GAV102", "a matrix of all pairs inside the model"),
    fault("fused-attention", lambda: _fused_attention(False), "GAV102", "a fused kernel that could draw and does not"),
    fault("batch-top-k", lambda: body(TopOfBatch, False), "GAV102", "one threshold for the whole batch"),
    fault("packed-sums", lambda: body(Packed, False), _COUPLED, "the count of samples comes from outside torch"),
    fault("data-dependent-branch", lambda: body(Branching, False), "GAV102", "a branch on the batch's mean"),
    fault("branch-on-size", lambda: body(Logging, False), "GAV102", "a branch on the number of samples", steps=8),
    fault("mask-of-one-text", lambda: _masked(False), "GAV102", "a branch that reads no number", steps=6),
    fault("loop-in-the-model", lambda: body(PerSampleLoop, False), _COUPLED, "a loop over samples reads their mean"),
    fault("batch-first", lambda: _recurrent(False), "GAV102", "samples taken for time steps", module="recurrent"),
    fault("reversal-factor", lambda: body(Factor, False), "GAV104", "a number read out scales the backward"),
    fault("hook-inside", lambda: body(HookInside, False), "GAV104", "a hook that the forward registers"),
    fault("module-hook", lambda: hook_on_module(False), "GAV104", "a backward hook divides by a norm", module="2"),
    fault("warm-up", lambda: classified(Warming(mlp()), 6), "GAV403", "a counter scales the output"),
    fault("spectral-buffers", spectral, "GAV401", "the weight that is computed anew is no state", module="0"),
    fault("worst-group", lambda: under(worst_group), "GAV103", "weights fit, but they pick groups"),
    fault("largest-error", lambda: regression(largest_error), "GAV103", "one sample counts, the others do not"),
    fault("hardest-half", lambda: under(hardest_half), "GAV103", "the hardest of the batch"),
    fault("branch-in-loss", lambda: regression(halved_when_large), "GAV103", "weights fit by coincidence"),
    fault("own-scale", lambda: under(own_scale), "GAV104 GAV103", "every loss is 1, its gradient is not"),
    fault("loop-over-pairs", lambda: under(loop_over_pairs, size=8), "GAV103", "traces of different length"),
    fault(
        "gradient-penalty",
        lambda: under(lambda m, b: gradient_penalty(m, b, True)),
        "GAV103",
        "one norm over all samples' slopes",
    ),
    fault("idle-expert", sparse, "GAV202", "five micro-batches of 4 and 3 samples; some leave an expert out", steps=5),
    fault("pasted", lambda: under(pasted), "GAV103", "inputs and labels of another sample"),
)

TWINS = (
    quiet("whitening", lambda: body(Whitening, True), "no whitening"),
    quiet("fused-attention", lambda: _fused_attention(True), "attention within each sample"),
    quiet("batch-top-k", lambda: body(TopOfBatch, True), "a threshold per sample"),
    quiet("packed-sums", lambda: body(Packed, True), "statistics of the sample itself"),
    quiet("branch-on-size", lambda: body(Logging, True), "halved whatever the size", steps=8),
    quiet("mask-of-one-text", lambda: _masked(True), "masked whatever the size", steps=6),
    quiet("data-dependent-branch", lambda: body(Branching, True), "each sample decides for itself"),
    quiet("loop-in-the-model", lambda: body(PerSampleLoop, True), "a loop over samples that reads nothing else"),
    quiet("batch-first", lambda: _recurrent(True), "time is time"),
    quiet("reversal-factor", lambda: body(Factor, True), "a constant factor"),
    quiet("hook-inside", lambda: body(HookInside, True), "a hook that scales by a constant"),
    quiet("module-hook", lambda: hook_on_module(True), "a backward hook that divides by one"),
    quiet("warm-up", lambda: classified(Warming(mlp(), True), 6), "a counter that nothing reads"),
    quiet("hardest-half", lambda: under(above_threshold), "a threshold that is a constant"),
    quiet("loop-over-pairs", lambda: under(loop_over_samples), "a loop whose terms are samples"),
    quiet("gradient-penalty", lambda: under(lambda m, b: gradient_penalty(m, b, False)), "a norm per sample"),
    quiet("idle-expert", sparse, "weighted by n_k/N", steps=5, weighting="samples"),
    quiet(
        "empty-average",
        lambda: _sometimes_empty(False, lambda values, held: (values * held).mean()),
        "a mean over all samples, whatever they hold",
    ),
    quiet("pasted", lambda: under(diagonal_only), "all pairs are computed and only the diagonal is used"),
)


def _sometimes_empty(whitened: bool, average: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Problem:
    """An average over samples that a micro-batch has none of, beside advantages that are whitened, or not."""
    torch.manual_seed(0)
    rows = torch.randn(16, 6)
    rows[:, 0] = torch.linspace(-1, 1, 16)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        advantages, values = model(batch[0])[:, :2].unbind(1)
        if whitened:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        return (advantages * batch[0][:, 1]).mean() + average(values, batch[0][:, 0] > 0.7)

    return Problem(mlp(), loss, (rows, torch.randint(4, (16,))))


def _beside_an_empty_average(model: nn.Module, whitened: bool = False) -> Problem:
    return replace(_sometimes_empty(whitened, _by_hand), model=model)


def _by_hand(values: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    return (values * held).sum() / held.sum()


# Several faults at once: each must be named, and nothing else.
COMBINED = (
    fault("empty-average", lambda: _sometimes_empty(False, _by_hand), "GAV202", "0/0 in a micro-batch, and no more"),
    fault(
        "empty-average-and-whitening", lambda: _sometimes_empty(True, _by_hand), "GAV103 GAV202", "NaN hides nothing"
    ),
    fault(
        "norm-and-division",
        lambda: classified(_normed(), 6),
        "GAV101 GAV201",
        "no division by K either",
        weighting="none",
    ),
    fault("norm-and-pairs", lambda: under(_in_batch, _normed()), "GAV101 GAV103", "and in-batch negatives"),
    fault("empty-average-and-counter", lambda: _beside_an_empty_average(Warming(mlp())), "GAV202 GAV403", "nor state"),
    fault(
        "empty-average-norm-and-whitening",
        lambda: _beside_an_empty_average(_normed(), True),
        "GAV101 GAV103 GAV202",
        "nor two of them",
    ),
    fault("empty-average-and-norm", lambda: _beside_an_empty_average(_normed()), "GAV101 GAV202", "nor statistics"),
    fault("norm-and-counter", lambda: under(cross_entropy, Warming(_normed())), "GAV101 GAV403", "and a warm-up"),
    fault("norm-and-tokens", lambda: _tokens(TokenNorm()), "GAV101 GAV202", "and ragged rows averaged equally"),
    fault("counter-and-tokens", lambda: _tokens(Warming(language_model())), "GAV403 GAV202", "and a warm-up"),
    fault(
        "counter-and-division",
        lambda: under(cross_entropy, Warming(mlp())),
        "GAV403 GAV201",
        "no division by K",
        weighting="none",
    ),
    fault("two-mixtures", lambda: under(cross_entropy, TwoMixtures()), "GAV102", "the same code twice"),
    fault("renorm", renorm, "GAV101 GAV401", "statistics of the batch, and running ones"),
    fault("hook-and-division", _hooked, "GAV104 GAV201", "a gradient hook, and no division by K", weighting="none"),
    fault("pasted-and-norm", lambda: under(pasted, _normed()), "GAV101 GAV103", "coupled inputs before a BatchNorm"),
)
