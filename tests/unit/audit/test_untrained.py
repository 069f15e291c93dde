"""What is said of a run that made no update: one sentence, with what helps."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest

from gaverify.audit.processes import check_updates
from gaverify.audit.recording.session import started_processes
from gaverify.errors import ProblemError
from gaverify.records.events import Event

STEP, BACKWARD = Event("step", 1), Event("backward", 1)


def said(*events: Event, launcher: tuple[str, ...] = (), **meta: Any) -> str:
    """What is said of a run with these events, empty where it trained."""
    known = {"reason": "script", "status": "", "by_hand": False, "had_gradients": False, "left_out": {}} | meta
    job = SimpleNamespace(role="full", by_hand=False, launcher=launcher)
    try:
        check_updates(SimpleNamespace(job=job, command="python t.py"), SimpleNamespace(events=events, meta=known))  # type: ignore[arg-type]
    except ProblemError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("meta", "helps"),
    [
        ({"processes": 2}, "`--launcher python`"),
        ({"elsewhere": 4}, "`nn.Parameter`"),
        ({"left_out": {"torch.func": 3}}, "`.grad`"),
        ({}, "neither a backward pass nor an optimizer step; give arguments"),
        ({"reason": "exit", "status": "0"}, "sys.exit(0)"),
    ],
)
def test_a_run_without_a_step(meta: dict[str, Any], helps: str) -> None:
    text = said(**meta)
    assert helps in text and "reached no optimizer step" in text
    assert text.count("\n") == 1


def test_processes_of_a_launcher_are_recorded() -> None:
    assert "--launcher" not in said(launcher=("python",), processes=2)


def test_backward_passes_without_a_step_ask_for_other_arguments() -> None:
    assert "backward passes, but no optimizer step; give arguments" in said(BACKWARD, processes=2)


def test_steps_without_gradients_ask_for_other_arguments() -> None:
    assert said(STEP).endswith("give arguments with which it trains for at least one update")


def test_a_run_that_trained_is_quiet() -> None:
    assert said(BACKWARD, STEP) == ""
    assert said(STEP, had_gradients=True) == ""
    assert said(by_hand=True) == ""  # it is run again


def test_processes_are_counted() -> None:
    before = started_processes()
    process = multiprocessing.get_context("spawn").Process(target=int)
    assert started_processes() == before + 1
    process.close()
