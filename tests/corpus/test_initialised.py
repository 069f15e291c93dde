"""State that the first forward sets from its batch, and draws that a whole batch shares.

By hand, without gaverify: with the layer initialised by the full batch both strategies give one gradient; without, the
first micro-batch sets another scale. A draw without a sample dimension is shared by all micro-batches here and made K
times in training, which a note says: `x · r` with one r per forward gives the full batch one r and a window K of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from problems import Parts, fault_codes, story
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
        self.ready = ready

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.codes.copy_(x.detach()[:: max(len(x) // 3, 1)][:3])
            self.ready = True
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


class Queue(Parts):
    """Every batch enters a queue and meets all of it; a table is made in the first forward and never read."""

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
    assert finding.proven and "run one forward pass on a full batch first" in finding.remedy, finding.remedy
    assert "gaverify ran it: equivalent" in finding.remedy
    assert finding.summary.startswith("the first forward initialises"), finding.summary
    assert "attribute" not in finding.summary, "a flag says that the buffer is set: no forward reads a number of it"
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
    assert not any("on a full batch first" in finding.remedy for finding in verdict.findings), story(verdict)


def test_state_that_is_set_first_and_moves_later_is_set_and_then_held() -> None:
    """A codebook held from the beginning would be trained as zeros: no repair."""
    verdict = gaverify.verify(network(MovingCodebook(6)), loss, batch(), steps=4)
    (finding,) = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert finding.code == "GAV401" and finding.proven and "codes" in finding.summary, story(verdict)
    assert finding.summary.startswith("the first forward initialises"), finding.summary
    assert "one forward pass on a full batch first" in finding.remedy and "once per optimizer step" in finding.remedy


def test_a_queue_is_not_set_first_although_something_else_is() -> None:
    verdict = gaverify.verify(
        network(Queue(keys=nn.Buffer(torch.zeros(4, 6)), table=nn.Buffer(torch.zeros(1)))), loss, batch(), steps=4
    )
    assert fault_codes(verdict) == {"GAV401"}, story(verdict)
    (finding,) = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert "keys" in finding.summary and "on a full batch first" not in finding.remedy, story(verdict)


STEPS = 4


class Scaled(nn.Module):
    """A linear layer whose output is multiplied by what `draw` returns for it."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor | float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x * self.draw(x)


def verdict_of(draw: Callable[[torch.Tensor], torch.Tensor | float]) -> gaverify.Verdict:
    torch.manual_seed(0)
    return gaverify.verify(Scaled(draw), loss, torch.randn(8, 4), steps=STEPS)


def shared(verdict: gaverify.Verdict) -> list[gaverify.Finding]:
    return [finding for finding in verdict.findings if "one value for the whole batch" in finding.summary]


def scalar(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(())  # here: scalar


def layer_drop(x: torch.Tensor) -> float:
    return 0.0 if torch.rand([]) < 0.1 else 1.0  # here: layer_drop


def by_python(x: torch.Tensor) -> float:
    return random.random()  # here: by_python


def by_numpy(x: torch.Tensor) -> float:
    return float(numpy.random.rand())  # here: by_numpy


def of_a_channel(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape[1])  # here: of_a_channel


@pytest.mark.parametrize("draw", [scalar, layer_drop, by_python, by_numpy, of_a_channel])
def test_a_draw_for_the_whole_batch_is_named_with_its_line(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    verdict = verdict_of(draw)
    assert verdict.outcome is Outcome.EQUIVALENT and not fault_codes(verdict), story(verdict)
    (finding,) = shared(verdict)
    assert (finding.code, finding.severity) == ("GAV301", "note")
    assert finding.location is not None and finding.location.line == draw.__code__.co_firstlineno + 1
    assert f"all {STEPS} micro-batches got the full batch's value" in finding.evidence[0].statement


def per_sample(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(len(x), 1)


def per_sample_by_python(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[random.random()] for _ in x])


def per_sample_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numpy.random.rand(len(x), 1), dtype=x.dtype)


@pytest.mark.parametrize("draw", [per_sample, per_sample_by_python, per_sample_by_numpy])
def test_draws_with_a_row_per_sample_are_dealt_and_not_shared(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    verdict = verdict_of(draw)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    assert not shared(verdict), story(verdict)
    assert any(finding.code == "GAV301" for finding in verdict.findings), story(verdict)


def test_no_draw_no_note() -> None:
    assert not verdict_of(lambda x: 1.0).findings


def test_one_micro_batch_shares_nothing() -> None:
    torch.manual_seed(0)
    assert not shared(gaverify.verify(Scaled(scalar), loss, torch.randn(8, 4), steps=1))


def test_by_hand_a_window_of_such_draws_is_another_estimate() -> None:
    """One generator state, and the window is far from the full batch: its K draws are others than the one."""
    torch.manual_seed(0)
    model, batch = Scaled(scalar).double(), torch.randn(8, 4, dtype=torch.float64)

    def gradient(parts: list[torch.Tensor]) -> torch.Tensor:
        model.zero_grad()
        for part in parts:
            (loss(model, part) / len(parts)).backward()
        return model.linear.weight.grad.clone()

    torch.manual_seed(1)
    whole = gradient([batch])
    torch.manual_seed(1)
    window = gradient(list(batch.chunk(STEPS)))
    assert float((window - whole).norm() / whole.norm()) > 0.05
