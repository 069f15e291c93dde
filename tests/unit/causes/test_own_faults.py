"""A fault of gaverify's own leaves with its own exception; what the model, the loss or a kernel raises is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import problems_coupling
import problems_weights
import pytest
import torch
from problems import Problem, fault_codes, mlp, squared_error
from torch import nn

import gaverify
from gaverify.causes import coupling, operations, proof, weights
from gaverify.causes.trace import operations as tracing
from gaverify.causes.trace.fingerprints import Layout, described
from gaverify.cli import main
from gaverify.errors import ProblemError
from gaverify.passes import dispatch, terms

SINGLE = torch.ones(1)  # a constant of the user's module, so that the control meets float32 beside float64


def planted(*_: Any, **__: Any) -> Any:
    raise TypeError("planted")


@pytest.mark.parametrize(
    ("room", "name"),
    [(coupling, "sample_coupling"), (operations, "trace_divergences"), (tracing, "described"), (proof, "ResultsHeld")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_in_a_probe_is_no_finding(room: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, name, planted)
    with pytest.raises(TypeError, match="planted"):
        gaverify.verify(problems_coupling.hand_written_batch_norm(), steps=4)


def test_a_fault_in_the_mode_is_no_error_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "_SLICE", None)  # multiplied by a number, by the observer of sums
    with pytest.raises(TypeError, match="unsupported operand"):
        gaverify.verify(problems_coupling.batch_norm(), steps=4)


def test_a_fault_in_the_float64_control_is_no_missing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")  # Python turns a TypeError in an operator into one of its own

    monkeypatch.setattr(dispatch, "_to_float64", wrong)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x).mean() * SINGLE).square().sum()

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="planted"):
        gaverify.verify(Problem(mlp(), loss, torch.randn(16, 6)), steps=4)


def test_the_command_line_leaves_with_70(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operations, "trace_divergences", planted)
    assert main(["run", "--model", "mlp-batchnorm", "--steps", "4"]) == 70
    printed = capsys.readouterr()
    assert "GAV000" not in printed.out
    assert "fault in gaverify, not in your model" in printed.err


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise TypeError("in the user's backward")


def _in_forward(model: nn.Module, batch: Any) -> torch.Tensor:
    raise TypeError("in the user's loss")


def _in_a_kernel(model: nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, (batch[0], batch[1].view(-1, 7)))


def _in_a_draw(model: nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, batch) * torch.randint(5, 2, (1,))


def _in_python_s_generator(model: nn.Module, batch: Any) -> torch.Tensor:
    import random

    return squared_error(model, batch) * random.choice([])


def _in_backward(model: nn.Module, batch: Any) -> torch.Tensor:
    return Raising.apply(squared_error(model, batch))


@pytest.mark.parametrize(
    "loss",
    [_in_forward, _in_a_kernel, _in_a_draw, _in_python_s_generator, _in_backward],
    ids=lambda loss: loss.__name__,
)
def test_what_the_users_code_raises_is_told(loss: Any) -> None:
    batch = torch.randn(16, 6), torch.randn(16, 4)
    with pytest.raises(ProblemError, match="the model or loss raised on the full batch"):
        gaverify.verify(Problem(mlp(), loss, batch), steps=4)


def test_what_a_weighting_raises_is_told() -> None:
    problem = problems_weights.mean_loss()
    with pytest.raises(ProblemError, match="no weight today"):
        gaverify.verify(problem, steps=4, weighting=lambda _: (_ for _ in ()).throw(TypeError("no weight today")))


def test_a_kernel_without_float64_is_no_fault_of_ours() -> None:
    """The float64 control raises in the user's code; the noise floor decides then."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype is torch.float64:
                raise NotImplementedError("no kernel for double")
            return self.layer(x)

    torch.manual_seed(0)
    problem = Problem(Single(), squared_error, (torch.randn(16, 6), torch.randn(16, 4)))
    verdict = gaverify.verify(problem, steps=4, weighting="none")
    assert verdict.method == "noise-floor"
    assert fault_codes(verdict) == {"GAV201"}


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_a_fold_that_does_not_divide_the_rows_has_no_fingerprint(rows: int) -> None:
    assert described(torch.ones(rows, 2), Layout("rows", 0, 2))[0] is None
    assert described(torch.ones(2 * rows, 2), Layout("rows", 0, 2))[0] is not None


def test_a_result_with_fewer_dimensions_than_its_plan_has_no_fingerprint() -> None:
    assert described(torch.ones(4), Layout("rows", 1))[0] is None
    assert described(torch.tensor(1.0), Layout("rows", 0, 2))[0] is None


@pytest.mark.parametrize(
    ("options", "code"), [({"weighting": "none"}, "GAV201"), ({"weighting": (0.3, 0.2, 0.25, 0.25)}, "GAV202")]
)
def test_a_control_that_ran_out_of_memory_keeps_the_finding(
    options: dict[str, Any], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*_: Any) -> Any:
        raise ProblemError("out of memory on cpu while running the full batch")

    monkeypatch.setattr(weights, "remedied", without_memory)
    verdict = gaverify.verify(problems_weights.mean_loss(), steps=4, **options)
    assert fault_codes(verdict) == {code}
    (finding,) = [finding for finding in verdict.findings if finding.code == code]
    assert not finding.proven
    assert any("no control run was possible (out of memory on cpu" in e.statement for e in finding.evidence)


@pytest.mark.parametrize(
    ("options", "code"), [({"weighting": "none"}, "GAV201"), ({"weighting": (0.3, 0.2, 0.25, 0.25)}, "GAV202")]
)
def test_a_control_that_ran_is_proof(options: dict[str, Any], code: str) -> None:
    verdict = gaverify.verify(problems_weights.mean_loss(), steps=4, **options)
    (finding,) = [finding for finding in verdict.findings if finding.code == code]
    assert finding.proven
    assert not any("no control run" in e.statement for e in finding.evidence)
