"""Fresh processes in place of forked ones: what comes back, what is raised, and what cannot be handed to them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import problems_ranks
import pytest
import torch

import gaverify
from gaverify import ProblemError
from gaverify.origins import LoadedAfresh
from gaverify.passes.devices import backend_of
from gaverify.preparation import settings_of_spec
from gaverify.ranks import coordinating
from gaverify.spec import Spec
from gaverify.verification import verify_spec

CPU = torch.device("cpu")
DRAWING = """
import os, torch
from gaverify import Problem
def drawing():
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    model = torch.nn.Linear(3, 1)
    return Problem(model, lambda model, batch: model(batch).mean(), torch.ones(8, 3))
"""


@pytest.fixture(name="fresh")
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a CPU are fresh processes, too."""
    monkeypatch.setattr(coordinating, "needs_fresh", lambda device: True)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("engine", "model"), [("ddp", "problems_ranks:own_count"), ("fsdp2", "mlp")])
def test_fresh_ranks_find_what_forked_ones_find(engine: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`own_count` diverges, so that its loss talks to the ranks, float64 decides, and a control runs."""
    told: list[object] = []
    spec = Spec(model=model, steps=1, ranks=2, engine=engine)
    fresh = verify_spec(spec, progress=lambda *report: told.append(report))
    monkeypatch.setattr(coordinating, "needs_fresh", lambda device: False)
    forked = verify_spec(spec)
    assert fresh.outcome is forked.outcome and fresh.findings == forked.findings
    assert repr(fresh.parameters) == repr(forked.parameters)
    assert repr(fresh.ranks) == repr(forked.ranks)
    assert told


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_a_live_model_is_handed_over() -> None:
    """Draws of Python, in a loop over the samples, are known again: the second reading goes by places in the code."""
    verdict = gaverify.verify(problems_ranks.drawing_per_sample(), steps=2, ranks=2)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT


@pytest.mark.usefixtures("fresh")
def test_a_model_that_cannot_be_handed_over_is_told() -> None:
    begun = time.monotonic()
    with pytest.raises(ProblemError, match="fresh processes, to which model, loss and batch cannot be handed") as told:
        gaverify.verify(problems_ranks.own_count(), steps=1, ranks=2)
    assert "CUDA_VISIBLE_DEVICES=" in str(told.value) and "gaverify run --ranks R --model" in str(told.value)
    assert time.monotonic() - begun < 30, "nothing is started"


def test_a_factory_that_draws_anew_is_told(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING, encoding="utf-8")
    spec = Spec(model=f"{tmp_path / 'drawing.py'}:drawing", steps=2, ranks=2)
    origin = LoadedAfresh(settings_of_spec(spec), spec)
    known = origin.known(origin.problem())
    with ExitStack() as stack, pytest.raises(ProblemError, match="its parameters differ from those of another one"):
        known.task(stack, CPU)
    spec = Spec(model="mlp", steps=2, ranks=2)
    twin = LoadedAfresh(settings_of_spec(spec), spec)
    with ExitStack() as stack:
        assert twin.known(twin.problem()).task(stack, CPU).steps == 4


def test_devices_that_ranks_cannot_have_are_told() -> None:
    problem = problems_ranks.noisy_on_ranks()
    settings = settings_of_spec(Spec(model="mlp", steps=1, ranks=2))
    with pytest.raises(ProblemError, match="ranks run on CPUs and on CUDA devices, not on mps; write device='cpu'"):
        coordinating.ranks_wanted(2, settings, "ddp", None, problem, torch.device("mps"))


@pytest.mark.parametrize(("there", "backend"), [(1, "gloo"), (2, "cpu:gloo,cuda:nccl"), (4, "cpu:gloo,cuda:nccl")])
def test_nccl_takes_a_device_per_rank(there: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    problem, settings = problems_ranks.noisy_on_ranks(), settings_of_spec(Spec(model="mlp", steps=1, ranks=2))
    ranks = coordinating.ranks_wanted(2, settings, "ddp", None, problem, torch.device("cuda", 0))
    assert backend_of(ranks.devices) == backend and ranks.fresh
    assert [str(device) for device in ranks.devices] == ["cuda:0", f"cuda:{min(1, there - 1)}"]
