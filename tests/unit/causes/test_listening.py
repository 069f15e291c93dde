"""What is heard of the float64 control is what a run of its own would show; where it does not run, nothing is lost."""

from __future__ import annotations

from typing import Any

import problems_coupling
import problems_state
import problems_weights
import pytest
import torch
from problems import Problem, fault_codes
from torch import nn

import gaverify
from gaverify.causes import state
from gaverify.causes.bench import Bench
from gaverify.causes.listening import Heard
from gaverify.passes.gradients import PassProbe
from gaverify.records.comparison import Method


def told(verdict: gaverify.Verdict) -> list[tuple[Any, ...]]:
    return [(f.code, f.proven, f.location, f.summary, f.remedy) for f in verdict.findings]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The accumulated runs that were made for their sketches alone."""
    seen: list[object] = []
    original = Bench.sketched

    def accumulated(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(Bench, "sketched", accumulated)
    return seen


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (problems_weights.mean_loss, {"weighting": "none"}),
        (problems_weights.ragged_tokens, {}),
        (problems_coupling.batch_norm, {}),
        (problems_coupling.contrastive, {}),
        (problems_state.moving_maximum, {}),
    ],
)
def test_a_diagnosis_that_hears_finds_what_one_of_its_own_finds(
    build: Any, options: dict[str, Any], runs: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = gaverify.verify(build(), steps=4, **options)
    with_it = len(runs)
    monkeypatch.setattr(Heard, "added_to", lambda self, earlier, accumulated: earlier)
    alone = gaverify.verify(build(), steps=4, **options)
    assert told(heard) == told(alone)
    assert with_it == len(runs) - with_it - 1, "the micro-batches were run once less"


def test_an_equivalent_verdict_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heard, "begin", lambda *_: pytest.fail("listened"))
    gaverify.verify(problems_weights.mean_loss(), steps=4, exact=True)
    with pytest.raises(pytest.fail.Exception, match="listened"):
        gaverify.verify(problems_weights.mean_loss(), steps=4, weighting="none")


class _Refusing(PassProbe):
    def around(self, k: int | None) -> Any:
        raise RuntimeError("the model does not run under a watch")


def test_a_control_that_cannot_be_listened_to_runs_without(runs: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaverify.verdict.control.is_own_fault", lambda _: False)
    monkeypatch.setattr("gaverify.passes.task.is_own_fault", lambda _: False)
    monkeypatch.setattr(Heard, "begin", lambda *_: (_Refusing(), lambda _: None))
    verdict = gaverify.verify(problems_weights.mean_loss(), steps=4, weighting="none")
    assert fault_codes(verdict) == {"GAV201"} and verdict.method is Method.FLOAT64_CONTROL
    assert len(runs) == 1


def test_state_that_only_micro_batches_change_is_heard() -> None:
    """A watch of the full batch alone would not see it."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.layer(x) * self.scale
            if len(x) < 16:
                self.scale = self.scale + 1.0
            return result

    torch.manual_seed(0)
    problem = Problem(Late(), lambda model, x: model(x).square().mean(), torch.randn(16, 6))
    verdict = gaverify.verify(problem, steps=4)
    assert fault_codes(verdict) == {"GAV401"}
    (finding,) = [finding for finding in verdict.findings if finding.code == "GAV401"]
    assert "scale" in finding.summary


def test_statistics_that_are_only_kept_for_evaluation_are_no_state_that_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "run_control", lambda *_, **__: pytest.fail("tried"))
    assert fault_codes(gaverify.verify(problems_coupling.batch_norm(), steps=4)) == {"GAV101"}


def test_statistics_that_are_read_are_state() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            moved = self.layer(x - self.norm.running_mean)
            self.norm(x)
            return moved

    torch.manual_seed(0)
    problem = Problem(Reading(), lambda model, x: model(x).square().mean(), torch.randn(16, 6))
    verdict = gaverify.verify(problem, steps=4)
    assert fault_codes(verdict) == {"GAV401"}
