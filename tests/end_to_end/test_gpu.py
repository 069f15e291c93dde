"""On a CUDA device: the verdict, the diagnosis where the model is, one synchronisation for the comparison, and ranks.

Two ranks share one device through gloo, or have one each through NCCL: whichever the machine allows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import problems_coupling
import pytest
import torch
from audits import SCRIPTS
from documents import only_answer
from problems import classified, fault_codes, story
from torch import nn

import gaverify
from gaverify import Outcome
from gaverify.spec import Spec
from gaverify.verification import verify_spec

NOT_SIMULATED = pytest.mark.skipif("GAVERIFY_SIMULATED_DEVICE" in os.environ, reason="for a real device")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"autocast": "float16"}], ids=str)
def test_dropout_is_replayed_on_the_device(options: dict[str, str]) -> None:
    torch.manual_seed(0)
    problem = classified(nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 4)), 6)
    verdict = gaverify.verify(problem, steps=4, device="cuda", **options)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    assert verdict.run.device.startswith("cuda")
    assert next(problem.model.parameters()).device.type == "cpu", "the model is put back"


def test_batch_norm_is_named_on_the_device() -> None:
    verdict = gaverify.verify(problems_coupling.batch_norm(), steps=4, device="cuda")
    assert fault_codes(verdict) == {"GAV101"}, story(verdict)
    assert all(finding.proven for finding in verdict.findings)


@pytest.mark.parametrize("kind", ["plain", "scaled"])
@pytest.mark.parametrize("divided", [True, False])
def test_an_audit_tells_a_forgotten_division_from_what_the_device_rounds(kind: str, divided: bool) -> None:
    """Convolutions are rounded by their batch's shape, and CUDA's fused kernels clip what was kept before them, too."""
    full = ["--full-set", "BATCH=16", "--full-set", "ACCUM=1", "--accumulated-set", "BATCH=4", "--format", "json", "--"]
    command = [sys.executable, "-m", "gaverify", "audit", str(SCRIPTS / "train_on_device.py"), *full, kind]
    done = subprocess.run([*command, *(() if divided else ("undivided",))], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if divided else 1), done.stderr
    faults = [found for found in only_answer(done.stdout)["findings"] if found["severity"] == "fault"]
    assert [(found["code"], found["proven"]) for found in faults] == ([] if divided else [("GAV201", True)])


def synchronised(layers: int) -> int:
    """How often a verification of so many layers waits for the device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)), nn.Linear(8, 4)).cuda()
    problem = classified(model, 8)
    gaverify.verify(problem, steps=4, device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            verdict = gaverify.verify(problem, steps=4, device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert verdict.method == "working-precision", story(verdict)
    return len([entry for entry in seen if "synchroniz" in str(entry.message)])


def test_a_verdict_synchronises_no_more_often_for_more_parameters() -> None:
    assert synchronised(24) == synchronised(3)


def on_ranks(model: str, engine: str, steps: int) -> gaverify.Verdict:
    return verify_spec(Spec(model=model, steps=steps, ranks=2, engine=engine, device="cuda"))


@pytest.mark.parametrize(
    ("model", "engine", "steps", "codes"),
    [
        ("mlp", "fsdp2", 2, set()),
        pytest.param("problems_ranks:own_count", "ddp", 1, {"GAV703"}, marks=NOT_SIMULATED),  # tried, and takes long
    ],
)
def test_fresh_ranks_compute_on_the_device(model: str, engine: str, steps: int, codes: set[str]) -> None:
    verdict = on_ranks(model, engine, steps)
    assert fault_codes(verdict) == codes, story(verdict)
    assert verdict.outcome is (Outcome.DIVERGENT if codes else Outcome.EQUIVALENT), story(verdict)
    assert verdict.run.device == "cuda:0" and verdict.ranks is not None


def test_ranks_of_the_host_leave_the_device_alone() -> None:
    """FSDP2 takes an accelerator wherever there is one, and autograd runs in no fork there."""
    spec = Spec(model="problems_ranks:noisy_on_ranks", steps=1, device="cpu", ranks=2, engine="fsdp2")
    verdict = verify_spec(spec)
    assert verdict.outcome is Outcome.EQUIVALENT and verdict.run.device == "cpu", story(verdict)


@NOT_SIMULATED
def test_batch_statistics_of_all_ranks_are_the_full_batchs() -> None:
    """One micro-batch per rank: together they hold the full batch. Without the module's exchange they do not."""
    synchronised, alone = (on_ranks(f"problems_ranks:{name}", "ddp", 1) for name in ("synchronised", "normalised"))
    assert synchronised.outcome is Outcome.EQUIVALENT, story(synchronised)
    assert fault_codes(alone) == {"GAV101"}, story(alone)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device per rank")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_ranks_have_devices_of_their_own(engine: str) -> None:
    verdict = on_ranks("problems_ranks:noisy_on_ranks", engine, 2)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
