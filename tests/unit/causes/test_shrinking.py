"""A divergence is judged and searched on a part of the batch, and confirmed on all of it; else the whole batch is.

Shapes: B = 16 samples of 6 features in K = 4 micro-batches; the part is the first 2 + 2 of them.
"""

from __future__ import annotations

import weakref

import problems_backward
import problems_coupling
import problems_losses
import problems_memory
import problems_state
import problems_statistics
import problems_weights
import pytest
import torch
import torch.nn.functional as F
from problems import Case, fault_codes, story
from torch import nn

import gaverify
from gaverify import Verdict
from gaverify.causes import confirming, questions
from gaverify.causes.bench import Bench
from gaverify.passes.isolation import ModelState
from gaverify.records.facts import Facts
from gaverify.verdict import window

_FAMILIES = (
    problems_backward,
    problems_coupling,
    problems_losses,
    problems_memory,
    problems_state,
    problems_statistics,
    problems_weights,
)
_CASES = {case.id: case for family in _FAMILIES for case in family.FAULTS}


class Centred(nn.Module):
    """Takes the mean over the batch away."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def verified(everywhere: bool, flagged: bool, **options: object) -> Verdict:
    """With a fault that all samples show, in the model, and one of those in the second half, in the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Centred() if everywhere else nn.Identity(), nn.Linear(8, 3))
    inputs = torch.randn(16, 6)
    inputs[:, -1] = (torch.arange(16) >= 8).float()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = model(batch[0])
        coupled = (batch[0][:, -1:] * found).sum(0).square().sum() if flagged else 0.0
        return F.cross_entropy(found, batch[1]) + coupled

    return gaverify.verify(model, loss, (inputs, torch.randint(3, (16,))), **options)  # type: ignore[arg-type]


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the smallest batches are worth a part."""
    monkeypatch.setattr(window, "WORTH", 0)


@pytest.mark.usefixtures("everything")
def test_a_fault_of_structure_is_found_in_a_part_and_confirmed_on_the_whole() -> None:
    verdict = verified(everywhere=True, flagged=False)
    assert verdict.run.part == (2, 2), story(verdict)
    assert {row.method for row in verdict.parameters} >= {"float64-part"} == {verdict.method}
    (finding,) = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert (finding.code, finding.proven) == ("GAV102", True), story(verdict)


@pytest.mark.usefixtures("everything")
def test_what_only_later_samples_show_is_searched_on_the_whole() -> None:
    verdict = verified(everywhere=False, flagged=True)
    assert verdict.run.part == () and verdict.method == "float64-control", story(verdict)
    assert fault_codes(verdict) == {"GAV103"}, story(verdict)


@pytest.mark.usefixtures("everything")
def test_a_second_cause_that_the_part_does_not_show_is_not_lost() -> None:
    verdict = verified(everywhere=True, flagged=True)
    assert verdict.run.part == (), story(verdict)
    assert fault_codes(verdict) == {"GAV102", "GAV103"}, story(verdict)
    assert said(verdict) == said(verified(everywhere=True, flagged=True, exact=True)), story(verdict)


@pytest.mark.usefixtures("everything")
def test_float64_runs_on_everything_where_that_was_asked_for_and_nowhere_for_an_equivalent_batch() -> None:
    assert verified(everywhere=True, flagged=False, exact=True).run.part == ()
    twin = verified(everywhere=False, flagged=False)
    assert (twin.outcome, twin.run.part) == (gaverify.Outcome.EQUIVALENT, ())


def test_a_small_batch_is_judged_as_a_whole() -> None:
    assert verified(everywhere=True, flagged=False).method == "float64-control"


def said(verdict: Verdict) -> list[tuple[object, ...]]:
    return sorted((f.code, f.severity, f.proven, f.remedy, str(f.location)) for f in verdict.findings)


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("name", ("A01", "A11", "B01", "B02", "B11", "D03", "C02"))
def test_a_part_finds_what_the_whole_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case: Case = _CASES[name]
    part = gaverify.verify(case.build(), steps=case.steps, **case.options)
    monkeypatch.setattr(window, "WORTH", 1 << 60)
    whole = gaverify.verify(case.build(), steps=case.steps, **case.options)
    assert said(part) == said(whole), story(part)
    assert {row.name for row in part.divergent} == {row.name for row in whole.divergent}


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of samples of the batches that questions are asked of; the whole one's come after a confirmation."""
    sizes: list[int] = []

    def noted(bench: Bench, facts: Facts) -> Facts:
        sizes.append(bench.task.batch_size)
        return facts

    monkeypatch.setattr(questions, "QUESTIONS", (noted, *questions.QUESTIONS))
    return sizes


_IN_FLOAT64 = {
    "A01": "GAV101",
    "A01b-by-hand": "GAV101",
    "A11": "GAV103",
    "B01": "GAV202",
    "B02": "GAV201",
    "masked-mean": "GAV202",
    "D03": "GAV401",
    "target-network": "GAV401",
    "averages": "GAV403",
    "gradient-hook": "GAV104",
}


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("name", _IN_FLOAT64)
def test_what_working_precision_does_not_confirm_float64_does(
    name: str, searched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _CASES[name]
    whole = gaverify.verify(case.build(), steps=case.steps, **(case.options | {"exact": True}))
    searched.clear()
    monkeypatch.setattr(confirming, "_MANY", 0)
    part = gaverify.verify(case.build(), steps=case.steps, **case.options)
    assert said(part) == said(whole) and _IN_FLOAT64[name] in fault_codes(part), story(part)
    assert part.method == "float64-control" and searched == [sum(part.run.part)] != [part.run.batch_size], searched


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("late", (True, False))
def test_what_cuts_the_graph_is_the_cause_only_where_nothing_diverges_before_it(
    late: bool, searched: list[int]
) -> None:
    """The control of a softmax over the samples holds what they get from it: no gradient goes to what is before it.

    An operation there couples the later samples, which the part does not have.
    """

    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flagged = (x[:, -1:] > 0).to(x)
            return x - flagged * (flagged * x).mean(0)

    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, 0)

    torch.manual_seed(0)
    before = (Late() if late else nn.Identity(), nn.Linear(6, 8), nn.Tanh())
    model = nn.Sequential(nn.Linear(6, 6), *before, Mixed(), nn.Linear(8, 3))
    inputs = torch.randn(16, 6)
    inputs[:, -1] = (torch.arange(16) >= 8).float()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))
        model[0].bias.zero_()
    batch = (inputs, torch.randint(3, (16,)))
    verdict = gaverify.verify(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch)
    assert "GAV102" in fault_codes(verdict), story(verdict)
    assert searched == ([4, 16] if late else [4]), searched


@pytest.mark.usefixtures("everything")
def test_another_operation_that_diverges_first_in_the_part_is_no_cause_of_the_whole() -> None:
    """Two samples of four in a micro-batch lie in a convolution as its channels could."""
    case = _CASES["A08"]
    part, whole = (gaverify.verify(case.build(), steps=2, exact=exact) for exact in (False, True))
    assert said(part) == said(whole), story(part)


def test_a_state_that_was_forgotten_holds_no_weights() -> None:
    model = nn.Linear(3, 3)
    state, held = ModelState([model]), weakref.ref(model.weight.data)
    assert state is not None
    state.forget()
    state.restore()
    assert held() is None
