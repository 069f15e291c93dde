"""The whole corpus of planted faults and twins, on the device, in every arrangement and reference: as on the host."""

from __future__ import annotations

import pytest
import torch
from arithmetic import ARRANGEMENTS, check
from arithmetic import FAULTS as KINDS
from problems import Case, story
from test_faults import FAULTS, TWINS
from torch import nn
from torch.utils._pytree import tree_map_only

import gaverify
from gaverify import Problem, ProblemError, Verdict
from gaverify.passes.experiment import Experiment, Placement
from gaverify.passes.gradients import Fitting
from gaverify.passes.isolation import ModelState, isolated_generators, seed_everything
from gaverify.records.outcomes import Reference

# Builders that draw from a generator of the host, which torch refuses while the device is the default.
DRAW_ON_THE_HOST = {"queue"}

CASES = [pytest.param(case, id=f"{case.outcome}-{case.id}") for case in (*FAULTS, *TWINS)]


def codes(verdict: Verdict) -> set[str]:
    return {finding.code for finding in verdict.findings if finding.severity == "fault"}


def agree(case: Case, verdict: Verdict) -> None:
    expected = case.verify()
    assert verdict.outcome is expected.outcome, f"{case.why}\n{story(verdict)}"
    assert codes(verdict) == codes(expected), f"{case.why}\n{story(verdict)}"
    proven = {(finding.code, finding.proven) for finding in verdict.findings if finding.severity == "fault"}
    assert proven == {(f.code, f.proven) for f in expected.findings if f.severity == "fault"}, story(verdict)


def mixes_devices(problem: Problem) -> bool:
    """Whether the loss fails without gaverify as well, once model and batch are moved as a user would move them."""
    problem.model.to("cuda")
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), problem.batch)
    try:
        problem.loss(problem.model, batch)
    except RuntimeError as error:
        return "same device" in str(error)
    return False


@pytest.mark.parametrize("case", CASES)
def test_the_device_agrees_with_the_host(case: Case) -> None:
    try:
        verdict = gaverify.verify(case.build(), steps=case.steps, **{**case.options, "device": "cuda"})
    except ProblemError as error:
        assert "move the rest yourself: " in str(error), error
        assert mixes_devices(case.build()), "nothing but the problem's own tensors may lie elsewhere"
        return
    assert verdict.run.device == "cuda:0"
    agree(case, verdict)


@pytest.mark.parametrize("case", CASES)
def test_a_default_device_changes_nothing(case: Case) -> None:
    """Scripts set it, so that problem, model and batch are made there; gaverify's own tensors name their device."""
    if case.id in DRAW_ON_THE_HOST:
        pytest.skip("its builder draws from a generator of the host")
    torch.set_default_device("cuda")
    try:
        problem: Problem = case.build()
        verdict = gaverify.verify(problem, steps=case.steps, **case.options)
    finally:
        torch.set_default_device(None)
    agree(case, verdict)


@pytest.mark.parametrize("fault", KINDS)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_on_the_device(name: str, fault: str) -> None:
    check(ARRANGEMENTS[name], fault, "cuda")


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
        experiment = Experiment(
            problem=gaverify.Problem(model, lambda model, batch: model(batch).square().mean(), batch),
            parameters=dict(model.named_parameters()),
            modules=[model],
            batch_size=1024,
            sizes=(512, 512),
            state=ModelState([model]),
            placement=Placement((torch.device("cuda", 0),)),
            fitting=Fitting(way),
        )
        seed_everything(0)
        before = DEVICE.live_bytes()
        DEVICE.reset_peak()
        result = experiment.full_batch()
        return {name: gradient.cpu() for name, gradient in result.gradients.items()}, (
            torch.cuda.max_memory_allocated() - before
        )


def test_offload_takes_less_of_the_device_and_gives_the_same_gradients() -> None:
    full, most = passed(Reference.FULL)
    gradients, peak = passed(Reference.OFFLOAD)
    assert all(torch.equal(gradients[name], full[name]) for name in full)
    assert peak < 0.6 * most


def test_the_verdict_says_offload() -> None:
    batch = torch.randn(64, 64, device="cpu")
    problem = gaverify.Problem(layers(), lambda model, batch: model(batch).square().mean(), batch)
    verdict = gaverify.verify(problem, device="cuda", reference="offload")
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT and verdict.run.reference is Reference.OFFLOAD
