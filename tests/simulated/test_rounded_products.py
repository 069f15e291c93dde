"""Products that torch's switches let round to TF32: said in text and JSON, and judged by that rounding."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gaverify
from gaverify import Outcome, Problem, Verdict
from gaverify.report import render

U32, U_TF32 = 2.0**-24, 2.0**-11


@pytest.fixture(params=["none", "tf32"])
def precision(request: pytest.FixtureRequest):
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = "none"


def verified(reduction: str = "mean", device: str = "cuda", **options) -> Verdict:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, device="cpu"), nn.Tanh(), nn.Linear(64, 4, device="cpu"))
    batch = torch.randn(16, 64, device="cpu"), torch.randint(0, 4, (16,), device="cpu")
    problem = Problem(model, lambda m, rows: cross_entropy(m(rows[0]), rows[1], reduction=reduction), batch)
    return gaverify.verify(problem, device=device, **options)


def test_it_is_said_in_text_and_json(precision: str) -> None:
    verdict = verified()
    said = precision == "tf32"
    assert verdict.outcome is Outcome.EQUIVALENT
    assert ("float32 (matmul tf32)" in render([verdict], "text")) is said
    document = json.loads(render([verdict], "json"))
    assert (json.dumps(["matmul tf32"]) in json.dumps(document)) is said
    assert verdict.run.rounded == (("matmul tf32",) if said else ())


def test_the_host_is_not_rounded_by_the_devices_switch(precision: str) -> None:
    assert verified(device="cpu").run.rounded == ()


def test_a_fault_is_proven_under_it(precision: str) -> None:
    verdict = verified("sum")
    assert [(f.code, f.proven) for f in verdict.findings if f.severity == "fault"] == [("GAV201", True)]


class InFloat32(nn.Linear):
    """A layer whose kernel knows no float64, so that the noise floor decides, in working precision's own roundoff."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the products.

        Raises:
            RuntimeError: They were asked for in float64.
        """
        if x.dtype is torch.float64:
            raise RuntimeError("no kernel for float64")
        return super().forward(x)


def test_the_unit_roundoff_follows(precision: str) -> None:
    torch.manual_seed(0)
    problem = Problem(
        InFloat32(64, 4, device="cpu"),
        lambda model, rows: model(rows).square().mean(),
        torch.randn(16, 64, device="cpu"),
    )
    verdict = gaverify.verify(problem, device="cuda", exact=True)
    assert (verdict.method, verdict.outcome) == ("noise-floor", Outcome.EQUIVALENT)
    unit = U_TF32 if precision == "tf32" else U32
    for row in verdict.parameters:
        assert 16 * unit * row.reference_norm <= row.allowed < 0.1 * row.reference_norm
        assert precision == "tf32" or row.allowed < 16 * U_TF32 * row.reference_norm
