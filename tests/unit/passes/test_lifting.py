"""Weights that are lifted as they are used give the gradients of a model in float64, and stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gaverify import Problem, ProblemError
from gaverify.passes.gradients import PassProbe, accumulated_gradients, full_batch_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.lifting import LiftedWeights
from gaverify.passes.task import Task
from gaverify.verdict.control import in_float64


class Sequence(nn.Module):
    """Tied embeddings, a recurrence, attention, a weight that is computed, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.out.weight = self.embed.weight
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.frozen(self.normed(self.block(self.lstm(self.embed(x))[0])))).mean(1)


class Image(nn.Module):
    """Convolutions, a norm in a checkpoint that is run again, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.up = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 3)
        self.scale, self.out = nn.Parameter(torch.rand(4, 1, 1)), nn.Linear(4, 5)
        self.register_buffer("shift", torch.rand(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda y: torch.relu(self.norm(self.first(y))), x, use_reentrant=False)
        return self.out((self.up(hidden) * self.scale + self.shift).to(self.scale.dtype).mean((2, 3)))


class Spectral(nn.Module):
    """Complex numbers that share the memory of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.fft(x, norm="forward") * torch.view_as_complex(self.weight)[:, :1]
        return torch.view_as_real(waves).pow(2)


KINDS = {
    Sequence: lambda: torch.randint(20, (4, 6)),
    Image: lambda: torch.randn(4, 3, 6, 6, dtype=torch.bfloat16),
    Spectral: lambda: torch.randn(4, 3, 6, 6),
}


def task_of(kind: type[nn.Module]) -> Task:
    torch.manual_seed(0)
    model = kind() if kind is Spectral else kind().to(torch.bfloat16)
    problem = Problem(model, lambda model, x: model(x).square().mean(), KINDS[kind]())
    return Task(
        problem=problem,
        batch_size=4,
        sizes=(2, 2),
        weighting="uniform",
        parameters={name: value for name, value in problem.model.named_parameters() if value.requires_grad},
        modules=[problem.model],
        device=torch.device("cpu"),
    )


def gradients(task: Task, weights: bool, probe: Callable[[Task], PassProbe | None]) -> dict[str, Any]:
    state = ModelState(task.modules, (task.problem.loss,))
    full, record = full_batch_gradients(task, state)
    with in_float64(task, state, weights=weights) as (lifted, there):
        return dict(accumulated_gradients(lifted, there, record, full, lift=True, probe=probe(lifted)).gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_those_of_a_model_in_float64(kind: type[nn.Module]) -> None:
    task = task_of(kind)
    copied = gradients(task, True, lambda _: None)
    names, seen = list(task.parameters), {}

    def listen(place: int, gradient: torch.Tensor) -> None:
        assert gradient.dtype is torch.float64
        seen[names[place]] = seen.get(names[place], 0.0) + gradient

    before = {name: value.clone() for name, value in task.problem.model.state_dict().items()}
    formed = gradients(task, False, lambda lifted: LiftedWeights(lifted, listen))
    assert all(gradient is None for gradient in formed.values()), "no set of them is held"
    assert seen.keys() == copied.keys()
    for name, gradient in seen.items():
        torch.testing.assert_close(gradient, copied[name], rtol=1e-12, atol=1e-14)
    for name, value in task.problem.model.state_dict().items():
        assert value.dtype is before[name].dtype and torch.equal(value, before[name])
    assert {type(weight) for weight in task.parameters.values()} == {nn.Parameter}


def test_what_an_operation_saves_is_the_weight_itself() -> None:
    """Between the forward and the backward nothing of a weight is in float64."""
    task = task_of(Image)
    probe = LiftedWeights(task, lambda *_: None)
    with probe.around(None):
        out = torch.nn.functional.linear(torch.ones(2, 4, dtype=torch.float64), task.problem.model.out.weight)
        assert out.dtype is torch.float64
        assert probe._live and all(lifted() is None for lifted, _ in probe._live.values())
        out.sum().backward()


@pytest.mark.parametrize("how", ["hook", "class"])
def test_weights_that_are_more_than_parameters_are_refused(how: str) -> None:
    class Own(nn.Parameter):
        pass

    task = task_of(Image)
    if how == "hook":
        task.problem.model.scale.register_hook(lambda gradient: gradient)
    else:
        task.problem.model.scale = Own(task.problem.model.scale.data)
    with pytest.raises(ProblemError, match="a weight"):
        LiftedWeights(task, lambda *_: None)
