"""On a CUDA device: the verdict, the diagnosis where the model is, and one synchronisation for the comparison."""

from __future__ import annotations

import warnings

import problems_coupling
import pytest
import torch
from problems import classified, fault_codes, story
from torch import nn

import gaverify
from gaverify import Outcome

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
