"""`--tail`: an epoch's short last window, which the first updates of a run never reach."""

from __future__ import annotations

import pytest
from audits import audit, events_of

pytestmark = pytest.mark.slow
SCRIPT = "train_epochs.py"


def test_without_it_the_verdict_says_that_no_end_was_reached() -> None:
    result = audit(SCRIPT, common="--end misscaled")
    assert (result.code, result.faults) == (0, set()), str(result)
    assert "no epoch's end was reached" in result.document["reason"], str(result)


@pytest.mark.parametrize(
    ("end", "code", "fault"), [("misscaled", 1, "GAV605"), ("lost", 1, "GAV604"), ("coupled", 1, "GAV103")]
)
def test_a_fault_at_the_end_is_found(end: str, code: int, fault: str) -> None:
    result = audit(SCRIPT, common=f"--end {end}", options=("--tail",))
    assert (result.code, result.faults) == (code, {fault}), str(result)


def test_the_right_loop_is_equivalent() -> None:
    result = audit(SCRIPT, common="--end right", options=("--tail",))
    assert (result.code, result.faults) == (0, set()), str(result)
    assert "last window has 2 of 4 micro-batches" in result.document["reason"], str(result)


def test_what_leaks_into_the_next_epoch_is_found() -> None:
    """The usual loop steps at multiples of K alone: a rest stays in `.grad`."""
    result = audit("loops_right.py", common="--loop usual", options=("--tail",))
    assert (result.code, result.faults) == (1, {"GAV602"}), str(result)


def test_a_loop_without_a_loader_says_so() -> None:
    result = audit("train_resuming.py", options=("--tail",))
    assert result.code == 0, str(result)
    assert "could not shorten an epoch" in result.document["reason"], str(result)


def test_calls_alone_tell_a_division_that_stays_the_same() -> None:
    result = events_of(SCRIPT, "--batch-size 7 --accum 4 --end misscaled", ("--updates", "0"))
    assert (result.code, result.faults) == (1, {"GAV605"}), str(result)


def test_calls_alone_do_not_tell_a_short_window_s_scale() -> None:
    result = events_of(SCRIPT, "--batch-size 7 --accum 4 --end right", ("--updates", "0"))
    assert (result.code, result.faults) == (3, set()), str(result)
    assert "backward passes where others have 4" in result.document["reason"], str(result)
