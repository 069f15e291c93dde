"""Offloaded activations leave the device, and the gradients are the same."""

from __future__ import annotations

import torch
from torch import nn

import gaverify
from gaverify.passes.gradients import full_batch_gradients
from gaverify.passes.isolation import ModelState, isolated_generators, seed_everything
from gaverify.passes.reference import Fitting
from gaverify.passes.task import Task
from gaverify.records.comparison import Reference

DEVICE = torch.ops.simulated


class Block(nn.Module):
    """Keeps four times the size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.dropout(x)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(8)]).to("cuda")


def passed(way: Reference) -> tuple[dict[str, torch.Tensor], int]:
    """Returns the gradients of a full batch, and the most bytes that it added to what the device held."""
    with isolated_generators():
        model = layers()
        batch = torch.randn(1024, 64, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to("cuda")
        task = Task(
            problem=gaverify.Problem(model, lambda model, batch: model(batch).square().mean(), batch),
            parameters=dict(model.named_parameters()),
            modules=[model],
            batch_size=1024,
            sizes=(512, 512),
            weighting="uniform",
            device=torch.device("cuda", 0),
            fitting=Fitting(way),
        )
        seed_everything(0)
        before = DEVICE.live_bytes()
        DEVICE.reset_peak()
        result, _ = full_batch_gradients(task, ModelState([model], (task.problem.loss,)))
        return {name: gradient.cpu() for name, gradient in result.gradients.items()}, (
            torch.cuda.max_memory_allocated() - before
        )


def test_offload_and_recompute_take_less_of_the_device_and_give_the_same_gradients() -> None:
    full, most = passed(Reference.FULL)
    for way in (Reference.OFFLOAD, Reference.RECOMPUTE):
        gradients, peak = passed(way)
        assert all(torch.equal(gradients[name], full[name]) for name in full)
        assert peak < 0.6 * most


def test_the_verdict_says_offload() -> None:
    batch = torch.randn(64, 64, device="cpu")
    problem = gaverify.Problem(layers(), lambda model, batch: model(batch).square().mean(), batch)
    verdict = gaverify.verify(problem, device="cuda", reference="offload", spill=True)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT and verdict.run.reference is Reference.OFFLOAD
