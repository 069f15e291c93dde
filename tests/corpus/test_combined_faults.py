"""Several faults at once: each is named with what it explains, nothing else is; and unseen faults are proven."""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F
from problems import Case, fault_codes, story
from problems_choices import FAULTS as CHOICES
from problems_experts import COMBINED as EXPERTS
from problems_losses import FAULTS as LOSSES
from problems_memory import COMBINED as MEMORY
from problems_memory import FAULTS as MEMORIES
from problems_state import COMBINED as STATE
from problems_unseen import COMBINED as UNSEEN
from problems_unseen import FAULTS
from torch import nn

import gaverify

COMBINED = (*UNSEEN, *EXPERTS, *MEMORY, *STATE)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in COMBINED])
def test_every_cause_is_named_and_no_other(case: Case) -> None:
    verdict = case.check()
    assert fault_codes(verdict) == case.codes, f"{case.why}\n{story(verdict)}"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id) for case in (*COMBINED, *FAULTS, *CHOICES, *LOSSES, *MEMORIES)]
)
def test_every_cause_is_proven(case: Case) -> None:
    verdict = case.verify()
    assert all(finding.proven for finding in verdict.findings if finding.severity == "fault"), story(verdict)


def test_two_causes_of_one_code_are_both_named() -> None:
    case = next(case for case in COMBINED if case.id == "two-mixtures")
    lines = [finding.location.line for finding in case.verify().findings if finding.code == "GAV102"]
    assert len(set(lines)) == 2


def test_a_queue_is_told_apart_from_in_batch_negatives_and_named_as_the_losss_own() -> None:
    case = next(case for case in COMBINED if case.id == "queue-and-negatives")
    queue = next(finding for finding in case.verify().findings if finding.code == "GAV403")
    assert queue.location is not None and queue.location.module == "criterion" and queue.location.kind == "Queue"
    assert any("restored alone, it moves" in evidence.statement for evidence in queue.evidence)


def test_a_scale_beside_state_is_one_factor_and_was_tested_with_the_state_held() -> None:
    """A moving average divides every micro-batch by a number of its own: that of this window is no weight."""
    for case in (case for case in COMBINED if case.id.endswith("divisor-and-scale")):
        scale = next(finding for finding in case.verify().findings if finding.code == "GAV201")
        assert "0.25 times the full-batch gradient = 1/K" in scale.summary
        assert (
            scale.remedy
            == "multiply each micro-batch's loss by 4 (weights 1, 1, 1, 1): tested with the state held, equivalent"
        )


def _summed(size: float, reduction: str = "sum") -> gaverify.Problem:
    """A loss over the samples beside a norm of all outputs, `size` times as large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        scores = model(batch[0])
        return F.cross_entropy(scores, batch[1], reduction=reduction) + size * scores.norm()

    return gaverify.Problem(model, loss, (torch.randn(16, 6), torch.randint(3, (16,))))


@pytest.mark.parametrize("size", [3e-3, 1e-5, 3e-6])
@pytest.mark.parametrize(("reduction", "weighting"), [("sum", "uniform"), ("mean", "none")])
def test_weights_that_explain_nearly_everything_are_named_before_a_small_coupling(
    size: float, reduction: str, weighting: str
) -> None:
    verdict = gaverify.verify(_summed(size, reduction), steps=4, weighting=weighting)
    assert [(f.code, f.proven) for f in verdict.findings if f.severity == "fault"] == [
        ("GAV201", True),
        ("GAV103", True),
    ], story(verdict)
    weights, coupling = verdict.findings[:2]
    assert "the causes named beside it make that" in weights.evidence[1].statement
    assert weights.remedy.startswith("repair 1 of 2") and coupling.remedy.startswith("repair 2 of 2")
    assert any("alone, with the other causes neutralised" in each.statement for each in coupling.evidence)


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-9])
def test_what_rounding_hides_is_no_cause_beside_weights(size: float) -> None:
    """Nor does it make of the full batch one that does not repeat itself."""
    verdict = gaverify.verify(_summed(size), steps=4)
    assert [f.code for f in verdict.findings if f.severity == "fault"] == ["GAV201"], story(verdict)
    assert verdict.findings[0].proven and "(weights 1, 1, 1, 1): tested, equivalent" in verdict.findings[0].remedy


def test_a_coupling_beside_a_mean_brings_no_weights_into_play() -> None:
    verdict = gaverify.verify(_summed(1e-3, "mean"), steps=4)
    assert [f.code for f in verdict.findings if f.severity == "fault"] == ["GAV103"], story(verdict)


def test_the_line_that_counts_is_named() -> None:
    """The loss call of a mean over valid targets, and the division of a mean that is written by hand."""
    lines = {}
    for by_hand in (False, True):
        finding = next(f for f in gaverify.verify(_counting(by_hand), steps=4).findings if f.severity == "fault")
        assert finding.code == "GAV202" and finding.proven
        assert finding.location is not None and finding.location.line is not None
        lines[by_hand] = linecache.getline(finding.location.file, finding.location.line).strip()
    assert "F.cross_entropy" in lines[False] and lines[True] == "return total / keep.sum()"


def _counting(by_hand: bool) -> gaverify.Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    targets = torch.randint(3, (16,))
    targets[[1, 5, 6, 13]] = -100

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        scores, keep = model(batch[0]), (batch[1] >= 0).to(batch[0].dtype)
        if not by_hand:
            return F.cross_entropy(scores, batch[1])
        total = (scores.logsumexp(1) * keep).sum()
        return total / keep.sum()

    return gaverify.Problem(model, loss, (torch.randn(16, 6), targets))


def test_the_share_of_a_cause_is_shown() -> None:
    case = next(case for case in COMBINED if case.id == "renorm")
    faults = [finding for finding in case.verify().findings if finding.severity == "fault"]
    texts = [" ".join(evidence.statement for evidence in finding.evidence) for finding in faults]
    assert all("alone" in text for text in texts), texts
