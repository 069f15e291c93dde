"""What ends or spares a pass: a time limit between two, and one of the full batch that was made before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import problems_coupling
import pytest
import torch
import torch.nn.functional as F
from forwards import experiment_of, forwards_of, make_large
from problems import Problem, fault_codes, story
from torch import nn

import gaverify
from gaverify import Outcome, Verdict, errors
from gaverify.cli import main
from gaverify.passes.gradients import PassResult
from gaverify.verdict.sketches import SketchedPass, keep_sketch

ONE_PROCESS = experiment_of(nn.Linear(1, 1))


def earlier_of(**found: torch.Tensor | None) -> SketchedPass:
    return keep_sketch(ONE_PROCESS, PassResult(dict(found), 1.0))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("relative", [0.0, 1e-1, 1e-6, 1e-12])
def test_a_difference_keeps_its_size(relative: float) -> None:
    before, off = numbers(300, 400), numbers(300, 400, seed=1)
    found = earlier_of(a=before, b=None).difference(
        {"a": before + relative * off / off.norm() * before.norm(), "b": None}
    )
    assert found == pytest.approx(relative, rel=0.1, abs=0)


@pytest.mark.parametrize("element", [0, 4_095, 99_999])
def test_a_single_element_hides_nowhere(element: int) -> None:
    before = numbers(100_000)
    after = before.clone()
    after[element] += 1e-3 * float(before.norm())
    assert earlier_of(a=before).difference({"a": after}) == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize(
    "after", [{"a": None}, {"a": numbers(3), "b": torch.ones(1)}, {"a": torch.full((3,), math.nan)}], ids=str
)
def test_a_gradient_on_one_side_only_and_no_number_are_no_rounding(after: dict[str, torch.Tensor | None]) -> None:
    before = earlier_of(a=numbers(3), b=None)
    assert before.comparable and before.difference({"b": None, **after}) == math.inf


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_nothing_is_held_against_a_gradient_that_tells_nothing(value: float) -> None:
    assert not earlier_of(a=torch.full((3,), value, dtype=torch.float64)).comparable


@pytest.mark.parametrize(
    ("build", "code", "runs"),
    [(problems_coupling.contrastive, "GAV103", 13), (problems_coupling.hand_written_batch_norm, "GAV101", 15)],
)
def test_a_repair_is_tried_without_another_full_batch(build: Callable[[], Problem], code: str, runs: int) -> None:
    verdict, forwards = forwards_of(build(), steps=4)
    assert [(f.code, f.proven) for f in verdict.findings if f.severity == "fault"] == [(code, True)]
    assert sum(samples == 16 for _, samples in forwards) == runs


class Clock:
    """Stands for `time`: hours pass when a description is reported for the n-th time."""

    def __init__(self, begins: str, times: int = 1) -> None:
        self.now, self._begins, self._left = time.monotonic(), begins, times

    def monotonic(self) -> float:
        return self.now

    def __call__(self, description: str, done: int, total: int) -> None:
        if description.startswith(self._begins):
            self._left -= 1
            self.now += 7200.0 * (self._left == 0)


@pytest.fixture
def stopped_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verdict]:
    """Verifies means over unequal counts behind a BatchNorm; an hour is over where a certain pass begins."""

    def stopped(*begins: object, is_large: bool = False, **options: object) -> Verdict:
        clock = Clock(*begins)  # type: ignore[arg-type]
        monkeypatch.setattr(errors, "time", clock)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        if is_large:
            make_large(model)
        targets = torch.randint(3, (16,))
        targets[:3] = -100
        batch = (torch.randn(16, 6), targets)
        asked = {"time_limit": 3600.0, "progress": clock, **options}
        return gaverify.verify(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch, **asked)

    return stopped


def ended(verdict: Verdict) -> bool:
    return "the time limit of 3600 s ended the search for the cause" in story(verdict)


def test_a_search_in_time_finds_what_one_without_a_limit_finds(stopped_at: Callable[..., Verdict]) -> None:
    free, in_time = (stopped_at("never", time_limit=limit) for limit in (None, 3600.0))
    assert in_time.findings == free.findings and not ended(free), story(in_time)
    assert fault_codes(free) == {"GAV101", "GAV202"}, story(free)


def test_the_verdict_comes_when_no_time_is_left_for_its_cause(stopped_at: Callable[..., Verdict]) -> None:
    free, late = stopped_at("never"), stopped_at("the full batch")
    assert late.outcome is Outcome.DIVERGENT and ended(late) and not fault_codes(late), story(late)
    assert (late.parameters, late.method) == (free.parameters, free.method)


def test_what_was_found_in_time_stays_with_what_it_ruled_out(stopped_at: Callable[..., Verdict]) -> None:
    late = stopped_at("control:", 3)
    (note,) = [finding for finding in late.findings if finding.code == "GAV000"]
    assert ended(late) and not note.proven and "gives the same result" in note.evidence[0].statement, note


def test_a_cause_that_was_found_in_time_stays_beside_the_end(stopped_at: Callable[..., Verdict]) -> None:
    late = stopped_at("a second batch", mode="eval")
    assert ended(late) and fault_codes(late) == {"GAV202"}, story(late)


def test_a_part_that_was_not_confirmed_in_time_leaves_the_verdict(stopped_at: Callable[..., Verdict]) -> None:
    late = stopped_at("control:", weighting="uniform", is_large=True)
    assert late.outcome is Outcome.DIVERGENT and ended(late), story(late)
    assert late.method == "float64-part" and late.run.part and all(row.outcome for row in late.parameters)


def test_no_limit_is_kept_of_a_verdict_that_is_equivalent(stopped_at: Callable[..., Verdict]) -> None:
    twin = stopped_at("the full batch", mode="eval", weighting="tokens")
    assert twin.outcome is Outcome.EQUIVALENT and not twin.findings, story(twin)


@pytest.mark.parametrize(("word", "code", "told"), [("1e-9", 1, "the time limit of 1e-09 s"), ("0", 2, "above 0")])
def test_the_option(word: str, code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", "mlp-batchnorm", "--time-limit", word]) == code
    assert told in " ".join("".join(capsys.readouterr()).split())


def test_a_limit_that_is_no_time_gets_a_sentence() -> None:
    with pytest.raises(gaverify.ProblemError, match=r"`time_limit`: must be a number of seconds above 0 .*, got -1"):
        gaverify.verify(nn.Linear(2, 1), lambda model, batch: model(batch).mean(), torch.ones(4, 2), time_limit=-1)
