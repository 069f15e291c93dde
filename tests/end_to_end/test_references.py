"""`reference` through the front door: the same verdict, words where nothing fits; hundreds of runs leave none."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from documents import only_answer
from problems import classified, story
from torch import nn

import gaverify
from gaverify import Outcome, Problem
from gaverify.cli import main
from gaverify.report import render

STEPS, SIZE = 4, 8


class Block(nn.Module):
    """A residual block; a hungry one cannot allocate the full batch's activations."""

    def __init__(self, inner: nn.Module, hungry: bool = False) -> None:
        super().__init__()
        self.inner, self.hungry = nn.Sequential(nn.Linear(8, 8), inner, nn.Tanh()), hungry

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hungry and len(x) == SIZE:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return x + self.inner(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(3)
    targets = torch.tensor([1, 0, 2, -100, 2, -100, 0, 1], device="cpu")
    return torch.randn(SIZE, 8, generator=generator, device="cpu"), targets


def build(inner: type[nn.Module] = nn.Identity, hungry: bool = False, padded: bool = False) -> gaverify.Problem:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(inner(8) if inner is not nn.Identity else inner(), hungry) for _ in range(3)])
    inputs, targets = batch()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return gaverify.Problem(model, loss, (inputs, targets if padded else targets.clamp(min=0)))


@pytest.mark.parametrize(
    ("inner", "padded", "codes"),
    [(nn.Identity, False, set()), (nn.BatchNorm1d, False, {"GAV101"}), (nn.Identity, True, {"GAV202"})],
)
def test_the_same_verdict_and_cause(inner: type[nn.Module], padded: bool, codes: set[str]) -> None:
    full = gaverify.verify(build(inner, padded=padded), steps=STEPS)
    other = gaverify.verify(build(inner, padded=padded), steps=STEPS, reference="offload")
    assert {f.code for f in other.findings if f.severity == "fault"} == codes
    assert [(f.code, f.location, f.proven) for f in other.findings] == [
        (f.code, f.location, f.proven) for f in full.findings
    ]
    assert other.outcome is full.outcome
    assert [row.reference_norm for row in other.parameters] == [row.reference_norm for row in full.parameters]
    assert other.run.reference == "offload"


def test_auto_stays_with_the_full_batch_where_it_fits() -> None:
    verdict = gaverify.verify(build(), steps=STEPS, reference="auto")
    run = json.loads(verdict.to_json())["run"]
    assert (run["reference"], run["reference_failed"]) == ("full", [])
    assert "activations" not in render([verdict], "text")


@pytest.mark.parametrize("way", ["full", "auto"])
def test_no_memory_on_a_cpu_names_no_way_that_would_change_nothing(way: str) -> None:
    with pytest.raises(gaverify.ProblemError, match="out of memory on cpu") as caught:
        gaverify.verify(build(hungry=True), steps=STEPS, reference=way)
    assert "--reference" not in str(caught.value)


def test_an_unknown_word() -> None:
    with pytest.raises(gaverify.ProblemError, match='`reference`: must be "full", "offload" or "auto", got "disk"'):
        gaverify.verify(build(), steps=STEPS, reference="disk")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--model", "mlp", "--reference", "offload", "--format", "json"]
    assert main(words) == 0
    document = only_answer(capsys.readouterr().out)
    assert document["run"]["reference"] == document["spec"]["reference"] == "offload"
    assert main(["run", "--model", "mlp", "--reference", "recompute"]) == 2
    assert '"full", "offload" or "auto"' in capsys.readouterr().err


WARM, RUNS = 50, 250
_LEAK = 16 << 20  # bytes; a leak of one gradient of the model below would come to 50 MB


def problem() -> Problem:
    """A model whose every gradient has 256 kB, with dropout, so that draws are recorded and dealt out as well."""
    torch.manual_seed(0)
    return classified(nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.2), nn.ReLU(), nn.Linear(256, 4)), 256, size=8)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def hooks(model: nn.Module) -> int:
    """How many hooks hang on the model, its parameters, and on all modules."""
    own = [module._forward_hooks for module in model.modules()] + [m._forward_pre_hooks for m in model.modules()]
    globally = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    return sum(map(len, own + globally)) + sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_hundreds_of_verifications_leave_nothing() -> None:
    subject = problem()
    states = torch.get_rng_state(), random.getstate()
    before = hooks(subject.model), len(os.listdir("/proc/self/fd")), sys.gettrace(), torch.get_default_dtype()
    weights = [parameter.detach().clone() for parameter in subject.model.parameters()]
    sizes = []
    for run in range(RUNS):
        verdict = gaverify.verify(subject, steps=4, exact=run % 10 == 0)
        assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
        if run in (WARM, RUNS - 1):
            gc.collect()
            sizes.append((resident(), len(gc.get_objects())))
    assert sizes[1][0] - sizes[0][0] < _LEAK
    assert sizes[1][1] - sizes[0][1] < RUNS - WARM, "less than an object for each run"
    after = hooks(subject.model), len(os.listdir("/proc/self/fd")), sys.gettrace(), torch.get_default_dtype()
    assert after == before
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert all(torch.equal(old, new) for old, new in zip(weights, subject.model.parameters(), strict=True))
