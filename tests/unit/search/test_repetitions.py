"""What a search runs again: forwards at its end, where a schedule looks like samples that interact, and controls."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forwards import forwards_of, make_large
from torch import nn
from torch.nn.functional import cross_entropy

import gaverify
from gaverify import Problem, Verdict
from gaverify.records.outcomes import Method
from gaverify.search import investigation


class NormAct(nn.BatchNorm1d):
    """BatchNorm with an activation, as libraries have it: GroupNorm does not replace it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


NormAct.__module__ = "torch.nn"  # a class of a library


def problem(model: nn.Module) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return model, nn.CrossEntropyLoss(), (torch.randn(16, 6), torch.randint(4, (16,)))


def network(*norms: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for norm in norms for layer in (norm, nn.Linear(8, 8))]
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 4))


def fault_codes(verdict: Verdict) -> list[str]:
    return [finding.code for finding in verdict.findings if finding.severity == "fault"]


def masked_problem(masked: tuple[int, ...] = (0, 5, 6, 9)) -> tuple[nn.Module, Any, Any]:
    """The micro-batches have as many samples and other numbers of targets, those of the first samples too."""
    model, loss, (inputs, targets) = problem(network())
    targets[list(masked)] = -100
    return model, loss, (inputs, targets)


def faults(given: tuple[nn.Module, Any, Any]) -> set[str]:
    return set(fault_codes(gaverify.verify(*given, steps=4)))


def forwards_after_decision(given: tuple[nn.Module, Any, Any]) -> int:
    """The number of forwards with which a cause is found."""
    model, loss, batch = given
    _, forwards = forwards_of(Problem(model, lambda model, batch: loss(model(batch[0]), batch[1]), batch), steps=4)
    return len(forwards) - 10


def verify_in_part(given: tuple[nn.Module, Any, Any]) -> tuple[Verdict, list[int], list[int]]:
    """The verdict of a batch whose first samples are searched, and the samples of each forward in both precisions."""
    model, loss, batch = given
    problem = Problem(make_large(model), lambda model, batch: loss(model(batch[0]), batch[1]), batch)
    verdict, forwards = forwards_of(problem, steps=4)
    assert verdict.run.part == (2, 2)
    single, double = ([n for dtype, n in forwards if dtype == wanted] for wanted in ("float32", "float64"))
    return verdict, single, double


BATCH = [16, 4, 4, 4, 4]
"""Samples of the passes of both strategies."""
PART = [4, 2, 2]
"""The same of the first samples."""
TRACE = [4, 2, 2]
"""The shapes of the first micro-batch are known from the passes of both strategies."""


def test_frozen_layers_of_two_classes_need_no_repetition() -> None:
    given = problem(network(nn.BatchNorm1d(8), NormAct(8)))
    assert faults(given) == {"GAV101"}
    assert forwards_after_decision(given) == 26


@pytest.mark.parametrize("factors", [(1.0, 1.1), (1.0, 1.0, 1.1), (1.0, 2.0, 1.0, 2.0, 0.5)])
def test_a_schedule_beside_weights_that_the_targets_count_is_told(factors: tuple[float, ...]) -> None:
    model, loss, batch = masked_problem()
    factor = itertools.cycle(factors).__next__
    scheduled = model, lambda model, batch: loss(model(batch[0]), batch[1]) * factor(), batch
    assert "GAV403" in faults(scheduled)


def test_weights_are_searched_in_the_part_and_confirmed_on_the_whole() -> None:
    verdict, single, double = verify_in_part(masked_problem())
    assert fault_codes(verdict) == ["GAV202"] and all(f.proven for f in verdict.findings if f.code == "GAV202")
    assert double == [*PART, *PART[1:], *TRACE], "nothing but the control and the line of the weights runs again"
    # Both strategies, the fit, the constants of the loss (which the full batch alone shows), the control.
    assert single == [*BATCH, *BATCH[1:], BATCH[0], *BATCH[1:]]


def test_a_second_batch_without_any_target_is_passed_over() -> None:
    model, loss, batch = masked_problem((0, 1, 3, 6, 8, 9, 12, 15))
    assert fault_codes(gaverify.verify(make_large(model), loss, batch, steps=4)) == ["GAV202"]


def test_layers_that_group_norm_replaces_are_frozen_in_the_part_and_replaced_on_the_whole() -> None:
    verdict, single, double = verify_in_part(problem(network(nn.BatchNorm1d(8))))
    assert single[-5:] == BATCH and len(single) <= 10 + len(PART)
    assert double == [*PART, *TRACE, *PART]
    (finding,) = [finding for finding in verdict.findings if finding.code == "GAV101"]
    assert finding.proven and "gaverify ran it" in finding.remedy and "eval()" in finding.remedy
    (control,) = [evidence for evidence in finding.evidence if evidence.label == "control"]
    assert "first 4 samples" in control.statement, "it ran there alone"


def test_layers_that_nothing_replaces_are_frozen_on_the_whole_alone() -> None:
    verdict, single, double = verify_in_part(problem(network(NormAct(8))))
    assert single[-5:] == BATCH and double == [*PART, *TRACE]
    (finding,) = [finding for finding in verdict.findings if finding.code == "GAV101"]
    (control,) = [evidence for evidence in finding.evidence if evidence.label == "control"]
    assert finding.proven and "first 4 samples" not in control.statement, "it ran on all of the batch"


def test_two_classes_are_searched_in_the_part_and_confirmed_together() -> None:
    verdict, single, double = verify_in_part(problem(network(nn.BatchNorm1d(8), NormAct(8))))
    assert single[-5:] == BATCH and fault_codes(verdict) == ["GAV101", "GAV101"]
    assert all(finding.proven for finding in verdict.findings if finding.code == "GAV101")
    # two traces, the controls of both, and the first released beside the second
    assert double == [*PART, *TRACE, *PART, 2, *TRACE, *PART, *PART]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, NormAct])
def test_a_presumed_control_that_leaves_something_is_no_cause_alone(norm: type[nn.Module]) -> None:
    """The loss couples the samples of the second half, which the first samples do not show."""
    model, _, (inputs, targets) = problem(make_large(network(norm(8))))
    inputs[:, -1] = (torch.arange(16) >= 8).float()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        return cross_entropy(outputs, batch[1]) + (batch[0][:, -1:] * outputs).sum(0).square().sum()

    verdict = gaverify.verify(model, loss, (inputs, targets), steps=4)
    assert set(fault_codes(verdict)) == {"GAV101", "GAV103"}


@pytest.mark.parametrize(
    ("norm", "is_large"), [(nn.BatchNorm1d, True), (nn.BatchNorm1d, False), (NormAct, True)], ids=str
)
def test_a_loss_that_does_not_repeat_is_told_beside_layers_that_mix_samples(
    norm: type[nn.Module], is_large: bool
) -> None:
    factor = itertools.count(1)
    model, _, batch = problem(network(norm(8)))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1]) * (1 + next(factor) ** 0.5)

    verdict = gaverify.verify(make_large(model) if is_large else model, loss, batch, steps=4)
    assert "GAV403" in fault_codes(verdict)


def test_layers_without_running_statistics_are_not_presumed_to_explain_everything() -> None:
    """Evaluation mode changes nothing there: the search in the part goes on, and no search of the whole follows."""
    verdict, _, double = verify_in_part(problem(network(NormAct(8, track_running_stats=False))))
    assert fault_codes(verdict) == ["GAV101"] and 16 not in double


# --- The question that CONTRIBUTING shows ----------------------------------------------------------------------------


def capped(cap: float) -> tuple[nn.Module, Any, Any]:
    """Samples with a loss of about 9 and of about 1; a micro-batch of the first samples, and one of all, is above 6."""
    torch.manual_seed(0)
    targets = torch.ones(16, 1)
    targets[[0, 1, 12, 13, 14, 15]] = 3.0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean().clamp(max=cap)

    model = nn.Linear(6, 1)
    with torch.no_grad():
        model.weight.mul_(0.01)
        model.bias.zero_()
    return model, loss, (torch.randn(16, 6), targets)


@pytest.mark.parametrize("is_large", [True, False], ids=["confirmed on all of the batch", "asked of all of the batch"])
def test_the_question_that_contributing_shows_is_asked_and_confirmed(
    is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Intervention" in code]
    names: dict[str, Any] = {}
    exec(code, names)
    monkeypatch.setattr(investigation, "QUESTIONS", (investigation.weights.ask, names["ask_caps"]))
    model, *rest = capped(6.0)
    verdict = gaverify.verify(make_large(model) if is_large else model, *rest, steps=4)
    assert (verdict.method is Method.FLOAT64_PART) is is_large
    (finding,) = [finding for finding in verdict.findings if finding.severity == "fault"]
    (control,) = [evidence for evidence in finding.evidence if evidence.label == "control"]
    assert (finding.code, finding.proven) == ("GAV103", True) and "caps on the loss left out" in control.statement
    assert gaverify.verify(*capped(60.0), steps=4).outcome is gaverify.Outcome.EQUIVALENT
