"""State that the first forward sets from the batch that it is given: one full batch forward first repairs it.

By hand, without gaverify: with the layer initialised by the full batch both strategies give one gradient; without, the
first micro-batch sets another scale.
"""

from __future__ import annotations

import pytest
import torch
from problems import fault_codes, story
from torch import nn

import gaverify
from gaverify import Outcome


class ActNorm(nn.Module):
    """Shift and scale are set so that the first batch comes out normalised, and are trained from there."""

    def __init__(self, channels: int, *, ready: bool = False) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.ones(channels))
        self.register_buffer("ready", torch.tensor(ready))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-6))
                self.ready.fill_(True)
        return (x + self.shift) * self.scale


class Codebook(nn.Module):
    """The first samples of the first batch become the codes; later batches are pulled to the nearest."""

    def __init__(self, channels: int, *, ready: bool = False) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(3, channels))
        self.register_buffer("ready", torch.tensor(ready))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.codes.copy_(x.detach()[:: max(len(x) // 3, 1)][:3])
            self.ready.fill_(True)
        nearest = self.codes[torch.cdist(x.detach(), self.codes).argmin(1)]
        return x + 0.1 * (x - nearest) ** 2


class Calibrated(nn.Module):
    """The mean size of the first batch becomes the scale."""

    def __init__(self, channels: int, *, ready: bool = False) -> None:
        super().__init__()
        self.register_buffer("size", torch.tensor(2.0 if ready else 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 0:
            self.size.copy_(x.detach().abs().mean())
        return (x / self.size).tanh()


class MovingCodebook(nn.Module):
    """The first samples of the first batch become the codes; every batch then pulls the nearest codes to itself."""

    def __init__(self, channels: int, *, ready: bool = False) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(3, channels))
        self.register_buffer("ready", torch.tensor(ready))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.detach()
        if not self.ready:
            self.set(seen[:: max(len(seen) // 3, 1)][:3])
            self.ready.fill_(True)
        nearest = torch.cdist(seen, self.codes).argmin(1)
        pulled = [seen[nearest == i].mean(0) if (nearest == i).any() else code for i, code in enumerate(self.codes)]
        self.set(0.5 * self.codes + 0.5 * torch.stack(pulled))
        return x + 0.1 * (x - self.codes[nearest]) ** 2

    def set(self, codes: torch.Tensor) -> None:
        self.codes.copy_(codes)


class Queue(nn.Module):
    """Every batch enters a queue and meets all of it; a table is made in the first forward and never read."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, channels))
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table == 0:
            self.table.fill_(1.0)
        self.keys.copy_(torch.cat([self.keys, x.detach()])[-4:])
        return x + 0.1 * (x @ self.keys.T).tanh().sum(1, keepdim=True)


class Moving(nn.Module):
    """Moves with every forward: one forward before repairs nothing."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return (x - self.mean).tanh()


class Level(nn.Module):
    """A level that follows every batch, and that only its nearest whole number is read of."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * (1 + self.level.round())
        self.level.lerp_(x.detach().cosh().mean(), 0.9)
        return scaled.tanh()


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def network(layer: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), layer, nn.Tanh(), nn.Linear(6, 1))


def batch() -> torch.Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layer", [ActNorm, Codebook, Calibrated])
def test_one_full_batch_forward_first_is_the_repair(layer: type[nn.Module]) -> None:
    model = network(layer(6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verdict = gaverify.verify(model, loss, batch(), steps=4)
    assert verdict.outcome is Outcome.DIVERGENT and fault_codes(verdict) == {"GAV401"}, story(verdict)
    (finding,) = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert finding.proven and "run one full batch through the model first" in finding.remedy, finding.remedy
    assert "tested, equivalent" in finding.remedy and finding.summary.startswith("the first forward sets")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "all is restored"
    model(batch())  # what the remedy says
    assert gaverify.verify(model, loss, batch(), steps=4).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize("layer", [ActNorm, Codebook, Calibrated])
def test_initialised_layers_are_quiet(layer: type[nn.Module]) -> None:
    verdict = gaverify.verify(network(layer(6, ready=True)), loss, batch(), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT and not fault_codes(verdict), story(verdict)


@pytest.mark.parametrize("layer", [Moving, Level])
def test_state_that_moves_with_every_forward_is_not_repaired_so(layer: type[nn.Module]) -> None:
    """Not even where one forward before makes both runs agree: the level's whole number stays the same by chance."""
    verdict = gaverify.verify(network(layer(6)), loss, batch(), steps=4)
    assert fault_codes(verdict) == {"GAV401"}, story(verdict)
    assert not any("through the model first" in finding.remedy for finding in verdict.findings), story(verdict)


def test_state_that_is_set_first_and_moves_later_is_set_and_then_held() -> None:
    """A codebook held from the beginning would be trained as zeros: no repair."""
    verdict = gaverify.verify(network(MovingCodebook(6)), loss, batch(), steps=4)
    (finding,) = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert finding.code == "GAV401" and finding.proven and "codes" in finding.summary, story(verdict)
    assert finding.summary.startswith("the first forward sets"), finding.summary
    assert "one full batch through the model first" in finding.remedy and "once per window" in finding.remedy


def test_a_queue_is_not_set_first_although_something_else_is() -> None:
    verdict = gaverify.verify(network(Queue(6)), loss, batch(), steps=4)
    assert fault_codes(verdict) == {"GAV401"}, story(verdict)
    (finding,) = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert "keys" in finding.summary and "through the model first" not in finding.remedy, story(verdict)
