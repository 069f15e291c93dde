"""References that recompute."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from gaverify.errors import ProblemError
from gaverify.passes import reference
from gaverify.passes.gradients import PassResult, full_batch_gradients
from gaverify.passes.isolation import ModelState, isolated_generators, seed_everything
from gaverify.passes.problem import Problem
from gaverify.passes.reference import Fitting, blocks_of
from gaverify.passes.task import Task
from gaverify.records.comparison import Reference

# --- A full batch whose blocks run again in the backward has the same gradient, state and draws as one without -------


class Block(nn.Module):
    """Two layers with whatever lies between them, and a count of its runs."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(8, 16), between, nn.Linear(16, 8)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.second(torch.tanh(self.between(self.first(x))))


class Stack(nn.Module):
    """Blocks one after the other; `order` says which."""

    def __init__(self, blocks: list[nn.Module], order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList(blocks), order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in self.order:
            x = self.blocks[at](x)
        return x


class Skipping(nn.Module):
    """A layer that Python's generator leaves out now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * 3.0 if random.random() < 0.5 else self.layer(x)


class Counting(nn.Module):
    """Scales by how often it ran, on the object and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0
        self.register_buffer("seen", torch.zeros((), device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        self.seen += 1
        return x * self.times * (1 + self.seen.clone())


class Shrinking(nn.Module):
    """Writes to its own parameter before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 16, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        return x * self.scale


class Caching(nn.Module):
    """Blocks that leave a tensor in a list that they are given, as a key-value cache is filled."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: torch.Tensor, *, cache: list[torch.Tensor]) -> torch.Tensor:
            cache.append(self.inner(x))
            return torch.stack(cache).prod(0)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, cache=cache)
        return x


class Overwriting(nn.Module):
    """Blocks that change their input in place."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0.5)
            return x + self.inner(x.clone())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = block(x)
        return x


def stack(make: Callable[[], nn.Module], order: tuple[int, ...] = (0, 1, 2)) -> Callable[[], nn.Module]:
    return lambda: Stack([Block(make()) for _ in range(3)], order)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": stack(lambda: nn.Dropout(0.3)),
    "batch-norm": stack(lambda: nn.BatchNorm1d(16)),
    "spectral-norm": stack(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))),
    "tied": stack(lambda: nn.Dropout(0.3), (0, 1, 0, 2, 0)),
    "tied-statistics": stack(lambda: nn.BatchNorm1d(16), (0, 1, 2, 0)),
    "python-draws": stack(Skipping),
    "counting": stack(Counting, (0, 1, 0, 2)),
    "shrinking": stack(Shrinking),
    "caching": Caching,
    "chain": lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(3)]),
    "plain-chain": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 8)
    ),
}
CHANGED = ("spectral-norm", "python-draws", "counting", "shrinking", "caching")
"""Models whose second run would not be the first one without their state put back."""


def task_of(model: nn.Module, way: Reference, loss: Any = None) -> Task:
    x = torch.randn(6, 8, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    problem = Problem(model, loss or (lambda model, batch: model(batch).square().mean()), x)
    return Task(
        problem=problem,
        parameters=dict(model.named_parameters()),
        modules=[model],
        batch_size=6,
        sizes=(3, 3),
        weighting="uniform",
        device=torch.device("cpu"),
        fitting=Fitting(way),
    )


def passed(name: str, way: Reference) -> tuple[PassResult, Any, dict[str, torch.Tensor], nn.Module]:
    """Runs the full batch; returns what it gave, the model's state afterwards, and the model."""
    with isolated_generators():
        seed_everything(0)
        model = MODELS[name]()
        task = task_of(model, way)
        result, record = full_batch_gradients(task, ModelState([model], (task.problem.loss,)))
    return result, record, dict(model.state_dict()), model


def same(one: PassResult, other: PassResult) -> bool:
    gradients = all(torch.equal(one.gradients[name], other.gradients[name]) for name in one.gradients)
    buffers = all(torch.equal(one.buffers[name], other.buffers[name]) for name in one.buffers)
    return gradients and buffers and one.loss == other.loss


@pytest.mark.parametrize("name", MODELS)
def test_the_same_gradients_statistics_and_draws_bit_for_bit(name: str) -> None:
    full, drawn, state, _ = passed(name, Reference.FULL)
    again, drawn_again, state_again, _ = passed(name, Reference.RECOMPUTE)
    assert same(full, again)
    assert drawn.count == drawn_again.count
    assert all(torch.equal(state[key], state_again[key]) for key in state)


@pytest.mark.parametrize("name", CHANGED)
def test_without_the_state_put_back_the_second_run_is_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = passed(name, Reference.FULL)[0]
    monkeypatch.setattr(reference, "_again", lambda *_: nullcontext())
    try:
        assert not same(full, passed(name, Reference.RECOMPUTE)[0])
    except Exception as error:
        assert "recomput" in str(error)  # torch saw by itself that another graph came out


@pytest.mark.parametrize("name", ["batch-norm", "counting"])
def test_without_it_statistics_are_updated_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = passed(name, Reference.FULL)[0]
    monkeypatch.setattr(reference, "_again", lambda *_: nullcontext())
    again = passed(name, Reference.RECOMPUTE)[0]
    assert any(not torch.equal(full.buffers[key], again.buffers[key]) for key in full.buffers)


def test_every_block_runs_twice_and_keeps_its_own_forward() -> None:
    model = MODELS["dropout"]()
    runs = io.StringIO()  # a list would be put back to what it was
    for block in model.blocks:
        block.between.register_forward_hook(lambda *_: runs.write("run ") and None)
    task = task_of(model, Reference.RECOMPUTE)
    full_batch_gradients(task, ModelState([model], (task.problem.loss,)))
    assert runs.getvalue() == "run " * 6
    assert all("forward" not in vars(block) for block in model.blocks)


def test_a_block_that_overwrites_its_input_is_refused_in_words() -> None:
    with isolated_generators(), pytest.raises(ProblemError, match=r"in place cannot be run again.*--reference offload"):
        task = task_of(Overwriting(), Reference.RECOMPUTE)
        full_batch_gradients(task, ModelState(task.modules, (task.problem.loss,)))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_blocks_are_the_outermost_repeated_modules() -> None:
    def stage() -> nn.Module:
        return nn.Sequential(*[Block(nn.Identity()) for _ in range(2)])

    model = Wrapped(nn.Sequential(nn.Linear(8, 8), stage(), stage(), nn.Linear(8, 8)))
    assert [type(block) for block in blocks_of([model])] == [Block] * 4
    assert blocks_of([nn.Linear(8, 8)]) == []
    assert blocks_of([Wrapped(Block(nn.Identity()))]) == []
    tied = Block(nn.Identity())
    assert len(blocks_of([Stack([tied, tied, Block(nn.Identity())])])) == 2
    short = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    assert blocks_of([short]) == []
    chain = nn.Sequential(*short, nn.Tanh(), nn.Linear(8, 8))
    assert blocks_of([chain]) == [chain]
