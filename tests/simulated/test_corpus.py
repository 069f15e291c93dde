"""The whole corpus of planted faults and twins, on the device: the same outcome and codes as on the host."""

from __future__ import annotations

import pytest
import torch
from problems import Case, story
from test_faults import FAULTS, TWINS
from torch.utils._pytree import tree_map_only

import gaverify
from gaverify import Problem, ProblemError, Verdict

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
