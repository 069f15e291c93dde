"""Whatever the loss can reach starts equal in both strategies, and is as it was afterwards."""

from __future__ import annotations

from typing import Any

import problems_reach
import pytest
import torch
from problems import fault_codes, story
from problems_reach import COUNTERS, GENERATORS, reach_batch

import gaverify
from gaverify import Outcome


@pytest.mark.parametrize("name", COUNTERS)
def test_state_of_the_loss_is_restored_and_starts_equal(name: str) -> None:
    """With K = 1 both strategies make their first call; with K = 4 the second micro-batch makes the second one."""
    loss, read = COUNTERS[name]()
    model, batch = reach_batch()
    before = read()
    verdict = gaverify.verify(model, loss, batch, steps=1)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    assert read() == before
    verdict = gaverify.verify(model, loss, batch, steps=4)
    assert verdict.outcome is Outcome.DIVERGENT, story(verdict)
    assert read() == before
    loss(model, batch)
    assert read() > before, "the test would not have noticed"


@pytest.mark.parametrize("name", COUNTERS)
def test_state_of_the_loss_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter starts at its beginning, whichever tests ran before: the global of one is not there yet."""
    monkeypatch.delattr(problems_reach, "MADE_ANEW", raising=False)
    loss, _ = COUNTERS[name]()
    verdict = gaverify.verify(*_arguments(loss), steps=4)
    assert fault_codes(verdict) <= {"GAV401", "GAV403"}, story(verdict)
    assert fault_codes(verdict), story(verdict)


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_of_the_user_count_as_the_global_ones_do(name: str) -> None:
    loss, moved = GENERATORS[name]()
    verdict = gaverify.verify(*_arguments(loss), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    assert not moved()
    loss(*reach_batch())
    assert moved(), "the test would not have noticed"


def _arguments(loss: Any) -> tuple[Any, Any, Any]:
    model, batch = reach_batch()
    return model, loss, batch


assert torch
