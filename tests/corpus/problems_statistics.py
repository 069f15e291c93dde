"""Normalisations of other forms than the usual ones, and values of the batch that decide how a model goes on.

Shapes: B = 16 samples of D = 6 features, or images of 3 channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from problems import Parts, classified, fault, mlp, quiet
from torch import nn

from gaverify import Problem


class NodeNorm(Parts):
    """Mean and deviation of all nodes of the batch, which are the samples, summed in place and read back by index."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graph = torch.arange(len(x)) if self.healthy else torch.zeros(len(x), dtype=torch.long)
        wide = torch.stack([x, x.flip(1)], 1)  # two nodes each
        centred = wide - self.mean(wide, graph)
        return (self.gain * centred / (self.mean(centred.square(), graph) + 0.1).sqrt()).sum(1) + x

    def mean(self, wide: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        total = wide.new_zeros(int(graph.max()) + 1, 8)
        count = wide.new_zeros(len(total), 1)
        total.index_add_(0, graph, wide.sum(1))  # planted node-norm
        count.index_add_(0, graph, torch.full_like(wide[:, 0, :1], 2.0))
        return (total / count)[graph][:, None]


def _nodes(healthy: bool) -> Problem:
    return classified(
        nn.Sequential(nn.Linear(6, 8), NodeNorm(healthy=healthy, gain=nn.Parameter(torch.ones(8))), nn.Linear(8, 4)), 6
    )


class Determined(nn.Module):
    """A normalisation of a flow: the normalised samples, and the logarithm of the determinant beside them."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, variance = self.mean, self.variance
        if self.training and not self.healthy:
            mean, variance = x.mean(0), x.var(0)  # planted determined
        return (x - mean) / (variance + 0.1).sqrt(), -0.5 * (variance + 0.1).log().sum().expand(len(x))


class Flow(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, determinant = self.norm(self.inner(x))
        return self.outer(normed) + determinant[:, None]


def _flow(healthy: bool) -> Problem:
    return classified(Flow(inner=nn.Linear(6, 8), norm=Determined(healthy), outer=nn.Linear(8, 4)), 6)


class PartnerStatistics(Parts):
    """Gives every sample a mixture of its own mean and deviation and those of a partner, at two places of one line."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.view(len(x), 2, 4)
        mean, deviation = groups.mean(2, keepdim=True), groups.std(2, keepdim=True) + 0.1
        order = torch.arange(len(x)) if self.healthy else torch.arange(len(x)).flip(0)
        normed = (groups - mean) / deviation
        own = normed * (deviation + deviation[order]) + mean + 0.3 * mean[order]  # planted partner-statistics
        return own.flatten(1)


def _partners(healthy: bool) -> Problem:
    return classified(nn.Sequential(nn.Linear(6, 8), PartnerStatistics(healthy=healthy), nn.Tanh(), nn.Linear(8, 4)), 6)


class Adaptive(nn.Module):
    """Solves a differential equation by Heun's method, with steps as long as the estimated error allows."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy
        self.field = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time, step = 0.0, 0.5
        while time < 1 - 1e-9:
            step = min(step, 1 - time)
            slope = self.field(x)
            euler = x + step * slope
            x = x + step * (slope + self.field(euler)) / 2
            time += step
            if not self.healthy:
                error = float((x - euler).detach().norm() / len(x) ** 0.5)  # planted step-size
                step *= min(2.0, max(0.3, 0.9 * (0.01 / max(error, 1e-12)) ** 0.5))
        return self.head(x)


def _adaptive(healthy: bool) -> Problem:
    return classified(Adaptive(healthy), 6)


class TensorSteps(nn.Module):
    """The same with steps that are tensors, moved by a mean over the batch or by one per sample."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.dims = (1,) if healthy else (0, 1)
        self.field = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = torch.tensor(0.2, dtype=x.dtype)
        for _ in range(4):
            slope = self.field(x)
            gain = step * (self.field(x + step * slope) - slope) / 2
            error = (gain / (1e-3 + 1e-3 * x.abs())).pow(2).mean(self.dims, keepdim=True).sqrt()  # planted tensor-steps
            x = x + step * slope + gain
            step = (step * (0.9 / error.sqrt()).clamp(0.2, 5)).detach()
        return x


def _tensor_steps(healthy: bool) -> Problem:
    """Far from the origin the solution hardly moves with the steps, as that of a solver should not."""
    torch.manual_seed(0)
    batch = 2 * torch.randn(16, 6), torch.randint(6, (16,))
    return Problem(TensorSteps(healthy), lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch)


class GraphCentring(nn.Module):
    """Subtracts the mean of each graph's nodes, which are the samples: graph g holds samples g, g + 2, …"""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        if self.healthy:
            return self.outer(h - h.mean(1, keepdim=True))
        count = torch.zeros(2, 1, dtype=h.dtype).scatter_add_(0, graph[:, None], torch.ones_like(h[:, :1]))
        total = torch.zeros(2, 8, dtype=h.dtype).scatter_add_(0, graph[:, None].expand_as(h), h)  # planted graph-norm
        return self.outer(h - (total / count)[graph])


def _graphs(healthy: bool) -> Problem:
    torch.manual_seed(0)
    batch = torch.randn(16, 6), torch.arange(16) % 2, torch.randint(4, (16,))
    return Problem(GraphCentring(healthy), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), batch)


class Larger(nn.Module):
    """Divides by the larger of two deviations, the batch's and the sample's: no scaling of channels."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy
        self.gain = nn.Parameter(torch.ones(1, 8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x.var((2, 3), unbiased=False, keepdim=True).add(1e-5).sqrt()
        if self.healthy:
            return x / (self.gain * x + own).abs().add(1)
        shared = x.var((0, 2, 3), unbiased=False, keepdim=True).add(1e-5).sqrt()  # planted larger-deviation
        return x / shared.max(self.gain * x + own)


def _images(healthy: bool) -> Problem:
    torch.manual_seed(0)
    return classified(nn.Sequential(nn.Conv2d(3, 8, 3), Larger(healthy), nn.Flatten(), nn.Linear(128, 4)), 3, 6, 6)


class ClassWise(torch.autograd.Function):
    """A cross entropy whose backward divides by how many samples of its class the batch holds, or by the batch."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, classes: torch.Tensor, healthy: bool) -> torch.Tensor:
        logs = logits.log_softmax(1)
        ctx.save_for_backward(logs, classes)
        ctx.healthy = healthy
        return F.nll_loss(logs, classes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logs, classes = ctx.saved_tensors
        away = logs.exp() - F.one_hot(classes, logs.shape[1])
        held = classes.bincount(minlength=logs.shape[1])[classes, None]
        return gradient * away / (len(logs) if ctx.healthy else held * logs.shape[1]), None, None


def _class_wise(healthy: bool) -> Problem:

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        return ClassWise.apply(logits, batch[1], healthy)  # planted class-wise

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


class DropBlock(nn.Module):
    """Drops whole positions, and rescales by the share that is kept: of the whole batch, or of each sample."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.rand_like(x[:, :1]) > 0.3).to(x)
        if self.healthy:
            return x * mask / mask.mean((1, 2, 3), keepdim=True)
        return x * mask * (mask.numel() / mask.sum())  # planted drop-block


def _dropped_blocks(healthy: bool) -> Problem:
    body = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), DropBlock(healthy), nn.Tanh(), nn.Flatten(), nn.Linear(288, 3))
    return Problem(body, nn.CrossEntropyLoss(), (torch.randn(16, 2, 6, 6), torch.randint(3, (16,))))


class OwnLoss(nn.Module):
    """Returns its loss: after a DropBlock or a share of what is positive; or a mean over valid samples."""

    def __init__(self, kept: nn.Module) -> None:
        super().__init__()
        self.body, self.kept, self.head = nn.Linear(6, 16), kept, nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(self.head(self.kept(self.body(x))), y.clamp(min=0), reduction="none") * (y >= 0)
        return (losses / (y >= 0).sum()).sum()  # planted own-loss


class PositiveShare(nn.Module):
    """Keeps what is positive in the first column, none of it in some micro-batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x[:, :1] > 0).to(x)
        return x * (mask.numel() / mask.sum())  # planted empty-share


def _own_loss(kept: nn.Module, ignored: int = 0) -> Problem:
    torch.manual_seed(0)
    model, x, y = OwnLoss(kept), torch.randn(16, 6), torch.randint(4, (16,))
    y[:ignored] = -1
    if isinstance(kept, PositiveShare):  # not in the second micro-batch of two, which no seed changes
        with torch.no_grad():
            model.body.weight[0], model.body.bias[0] = 1.0, 0.0
        x = x.abs() * torch.where(torch.arange(16) < 8, 1, -1)[:, None]
    return Problem(model, lambda m, b: m(*b), (x, y))


class Dropped(nn.Module):
    """A DropBlock of rows of features."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.rand_like(x) > 0.3).to(x)
        if self.healthy:
            return x * mask / mask.mean(1, keepdim=True)
        return x * mask * (mask.numel() / mask.sum())  # planted own-drop-block


class ScaledInputs(nn.Module):
    """Scales its inputs by the share that a mask keeps, of the batch or of each sample, and returns its loss."""

    def __init__(self, dims: tuple[int, ...], in_all: bool) -> None:
        super().__init__()
        self.inner, self.dims, self.in_all = nn.Linear(6, 6), dims, in_all

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        scaled = x * kept / kept.mean(self.dims, keepdim=True)  # planted scaled-inputs
        errors = (self.inner(scaled) - x).square()
        return (errors * (1 - kept)).sum() / (1 - kept).sum() if self.in_all else errors.mean()


def _scaled_inputs(*dims: int, in_all: bool = False) -> Problem:
    torch.manual_seed(0)
    kept = (torch.rand(16, 6) < torch.linspace(0.3, 0.9, 16)[:, None]).float()
    kept[:, 0] = 1
    return Problem(ScaledInputs(dims, in_all), lambda m, b: m(*b), (torch.randn(16, 6), kept))


def _clearing(how: str) -> Problem:
    torch.manual_seed(0)
    model = mlp()
    if how == "hook":
        model.register_forward_pre_hook(lambda module, _: module.zero_grad(set_to_none=False))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = F.cross_entropy(model(batch[0]), batch[1])
        if how == "loss":
            model.zero_grad()
        return value

    return Problem(model, loss, (torch.randn(16, 6), torch.randint(4, (16,))))


FAULTS = (
    fault("node-norm", lambda: _nodes(False), "GAV102", "sums that are written in place are held, too", module="1"),
    fault("determined", lambda: _flow(False), "GAV101", "a normalisation that hands out two tensors", module="norm"),
    fault("partner-statistics", lambda: _partners(False), "GAV102", "partners enter at two places", module="1"),
    fault("zero-in-loss", lambda: _clearing("loss"), "GAV603", "no weights bring cleared gradients back"),
    fault("zero-in-hook", lambda: _clearing("hook"), "GAV603", "no weights bring cleared gradients back"),
    fault("class-wise", lambda: _class_wise(False), "GAV104", "the backward divides by the batch's counts"),
    fault(
        "drop-block", lambda: _dropped_blocks(False), "GAV102", "a divisor of activations, not of a mean", module="1"
    ),
    fault("own-drop-block", lambda: _own_loss(Dropped(False)), "GAV102", "the model returns its loss", module="kept"),
    fault(
        "empty-share", lambda: _own_loss(PositiveShare()), "GAV102", "by infinity where nothing is kept", module="kept"
    ),
    fault("own-loss", lambda: _own_loss(nn.Tanh(), 3), "GAV202", "a mean of the loss within the model"),
    fault("scaled-inputs", lambda: _scaled_inputs(0, 1), "GAV102", "inputs have no graph that shows it", module=""),
    fault("step-size", lambda: _adaptive(False), "GAV102", "the error is a norm over the batch"),
    fault("tensor-steps", lambda: _tensor_steps(False), "GAV102", "a solver hardly hears of its error norm"),
    fault("graph-norm", lambda: _graphs(False), "GAV102", "graphs reach across the micro-batches", module=""),
    fault("larger-deviation", lambda: _images(False), "GAV101", "a variance over the batch", module="1"),
)

TWINS = (
    quiet("node-norm", lambda: _nodes(True), "the nodes of each sample have statistics of their own"),
    quiet("determined", lambda: _flow(True), "stored statistics"),
    quiet("partner-statistics", lambda: _partners(True), "each sample is its own partner"),
    quiet("zero-nowhere", lambda: _clearing(""), "gradients stay"),
    quiet("class-wise", lambda: _class_wise(True), "the backward divides by the number of samples"),
    quiet("drop-block", lambda: _dropped_blocks(True), "each sample has a share of its own"),
    quiet("own-drop-block", lambda: _own_loss(Dropped(True)), "each sample has a share of its own"),
    quiet("own-loss", lambda: _own_loss(nn.Tanh()), "all samples are valid"),
    quiet("scaled-inputs", lambda: _scaled_inputs(1), "each sample has a share of its own"),
    quiet("step-size", lambda: _adaptive(True), "the same steps for every batch"),
    quiet("tensor-steps", lambda: _tensor_steps(True), "each sample has steps of its own"),
    quiet("graph-norm", lambda: _graphs(True), "each node has a mean of its own"),
    quiet("larger-deviation", lambda: _images(True), "each sample has a deviation of its own"),
)

COMBINED = (
    fault(
        "masked-and-scaled",
        lambda: _scaled_inputs(0, 1, in_all=True),
        "GAV102 GAV202",
        "a share of the inputs, and a mean over the rest",
    ),
)
