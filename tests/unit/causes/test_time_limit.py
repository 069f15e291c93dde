"""A time limit ends the search for a cause between two passes; what was decided stays decided."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from problems import fault_codes, story
from torch import nn

import gaverify
from gaverify import Outcome, Verdict
from gaverify.cli import main
from gaverify.passes import limiting
from gaverify.verdict import window


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

    def stopped(*begins: object, **options: object) -> Verdict:
        clock = Clock(*begins)  # type: ignore[arg-type]
        monkeypatch.setattr(limiting, "time", clock)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
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
    assert late.parameters == free.parameters and late.method == free.method


def test_what_was_found_in_time_stays_with_what_it_ruled_out(stopped_at: Callable[..., Verdict]) -> None:
    late = stopped_at("control:", 3)
    (note,) = [finding for finding in late.findings if finding.code == "GAV000"]
    assert ended(late) and not note.proven and "agrees with itself" in note.evidence[0].statement, note


def test_a_cause_that_was_found_in_time_is_told_beside_the_end_of_the_search(
    stopped_at: Callable[..., Verdict],
) -> None:
    late = stopped_at("a second batch", mode="eval")
    assert ended(late) and fault_codes(late) == {"GAV202"}, story(late)


def test_a_part_that_was_not_confirmed_in_time_leaves_the_verdict(
    stopped_at: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "WORTH", 0)
    late = stopped_at("control:", weighting="uniform")
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
    with pytest.raises(gaverify.ProblemError, match="time_limit is -1"):
        gaverify.verify(nn.Linear(2, 1), lambda model, batch: model(batch).mean(), torch.ones(4, 2), time_limit=-1)
