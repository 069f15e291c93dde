"""Normalisations of forms that are not torch's: sums by index, a determinant beside the result, partners' statistics.

Shapes: B = 16 samples of D = 6 features.
"""

from __future__ import annotations

import torch
from problems import Problem, classified, fault, quiet
from torch import nn


class NodeNorm(nn.Module):
    """Mean and deviation of all nodes of the batch, which are the samples, summed in place and read back by index."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy
        self.gain = nn.Parameter(torch.ones(8))

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
    return classified(nn.Sequential(nn.Linear(6, 8), NodeNorm(healthy), nn.Linear(8, 4)), 6)


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


class Flow(nn.Module):
    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), Determined(healthy), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, determinant = self.norm(self.inner(x))
        return self.outer(normed) + determinant[:, None]


def _flow(healthy: bool) -> Problem:
    return classified(Flow(healthy), 6)


class PartnerStatistics(nn.Module):
    """Gives every sample a mixture of its own mean and deviation and those of a partner, at two places of one line."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.view(len(x), 2, 4)
        mean, deviation = groups.mean(2, keepdim=True), groups.std(2, keepdim=True) + 0.1
        order = torch.arange(len(x)) if self.healthy else torch.arange(len(x)).flip(0)
        normed = (groups - mean) / deviation
        own = normed * (deviation + deviation[order]) + mean + 0.3 * mean[order]  # planted partner-statistics
        return own.flatten(1)


def _partners(healthy: bool) -> Problem:
    return classified(nn.Sequential(nn.Linear(6, 8), PartnerStatistics(healthy), nn.Tanh(), nn.Linear(8, 4)), 6)


FAULTS = (
    fault("node-norm", lambda: _nodes(False), "GAV102", "sums that are written in place are held, too", module="1"),
    fault("determined", lambda: _flow(False), "GAV101", "a normalisation that hands out two tensors", module="norm"),
    fault("partner-statistics", lambda: _partners(False), "GAV102", "partners enter at two places", module="1"),
)
TWINS = (
    quiet("node-norm", lambda: _nodes(True), "the nodes of each sample have statistics of their own"),
    quiet("determined", lambda: _flow(True), "stored statistics"),
    quiet("partner-statistics", lambda: _partners(True), "each sample is its own partner"),
)
