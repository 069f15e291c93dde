"""What is said of a run without updates, and what cannot be read while a graph is captured.

What the weights that fit decide of an update below float32: on rows made by hand, where the norm of the whole
full-batch gradient is 1 and u = 2⁻⁸.
"""

from __future__ import annotations

import math
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from gaverify.audit.job import Command, Job
from gaverify.audit.processes import Child, check_updates
from gaverify.audit.reading import RecordedRun
from gaverify.audit.recording.recorder import started_processes
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.values import out_of_sight
from gaverify.audit.stages import ComparedRows, decide_by_weights
from gaverify.errors import ProblemError, Uncompared
from gaverify.records.events import Backward, ClosingRecord, Ending, Event, Step, UnseenCalls, WeightsMoved
from gaverify.records.experiment import WeightFit
from gaverify.records.outcomes import Method, NotCompared, Outcome, ParameterComparison, resolution_of


@pytest.mark.parametrize(("initialised", "capturing"), [(True, True), (True, False), (False, True)])
def test_nothing_can_be_read_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, initialised: bool, capturing: bool
) -> None:
    """A build without CUDA cannot even be asked."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert ("CUDA graph capture" in out_of_sight()) is (initialised and capturing)


U = 2.0**-8


def row(name: str, reference: float, difference: float, why: NotCompared | None = None) -> ParameterComparison:
    floor = Outcome.INCONCLUSIVE  # what the noise floor made of it
    return ParameterComparison(
        name, (4,), floor, Method.NOISE_FLOOR, reference, reference, difference, 0.9, difference, None, why
    )


def rows(apart: float) -> ComparedRows:
    """Two parameters, the second a tenth as large and as far apart as the first is long."""
    scale = 1 / math.hypot(1, 0.1)
    return ComparedRows((row("large", scale, apart * scale), row("small", 0.1 * scale, 0.1 * apart * scale)), 0.6)


def fit(residual: float) -> WeightFit:
    return WeightFit((0.25,) * 4, residual, determined=True, used=(0.25,) * 4)


def outcomes(found: ComparedRows) -> set[Outcome]:
    return {row.outcome for row in found.parameters}


@pytest.mark.parametrize("apart, rest", [(7.9 * U, 7.0 * U), (4 * U, 3.5 * U), (1.9 * U, 0.1 * U), (0.0, 0.0)])
def test_a_rest_that_no_weights_explain_is_rounding(apart: float, rest: float) -> None:
    found = decide_by_weights(rows(apart), fit(rest), U)
    assert outcomes(found) == {Outcome.EQUIVALENT}
    assert {row.method for row in found.parameters} == {Method.WEIGHTS}
    assert found.noise == rest
    assert resolution_of(found.parameters) == pytest.approx(8 * U)


@pytest.mark.parametrize("apart, rest", [(0.25, 0.02), (3.0, 0.02), (8.2 * U, 2 * U)])
def test_what_other_weights_explain_is_a_fault(apart: float, rest: float) -> None:
    found = decide_by_weights(rows(apart), fit(rest), U)
    assert outcomes(found) == {Outcome.DIVERGENT}
    assert found.noise == rest


def test_a_parameter_that_differs_by_no_more_than_the_rest_stays_open() -> None:
    """Its own difference may be rounding; that the weights are wrong shows in the others."""
    made = rows(0.25)
    within = replace(made, parameters=(made.parameters[0], made.parameters[1]._replace(difference_norm=0.001)))
    found = decide_by_weights(within, fit(0.02), U)
    assert [row.outcome for row in found.parameters] == [Outcome.DIVERGENT, Outcome.INCONCLUSIVE]


@pytest.mark.parametrize(
    "apart, rest",
    [
        (7.9 * U, 1.0 * U),  # within rounding, and other weights explain most of it
        (0.25, 8.5 * U),  # more rest than rounding leaves: structure, or a net that rounds more
        (0.058, 0.031),  # more than rounding, of which weights explain seven tenths
        (0.9, 0.9),
    ],
)
def test_what_the_weights_do_not_tell_is_left_to_the_noise_floor(apart: float, rest: float) -> None:
    made = rows(apart)
    assert decide_by_weights(made, fit(rest), U) is made


SPOILT = [
    row("spoilt", math.nan if why.missing else 0.5, math.nan, why)
    for why in (NotCompared.MISSING_IN_ACCUMULATED, NotCompared.NOT_FINITE_IN_ACCUMULATED)
]


@pytest.mark.parametrize(
    ("made", "weights", "unit"),
    [
        (rows(1e-8), fit(1e-8), 2.0**-24),
        (rows(0.25), None, U),
        (rows(0.25), replace(fit(0.02), vacuous=True), U),
        *((ComparedRows((*rows(0.01).parameters, spoilt), 0.6), fit(0.01), U) for spoilt in SPOILT),
        (ComparedRows((row("zero", 0.0, 0.0),), 0.0), fit(0.0), U),
    ],
    ids=["float32", "no fit", "as many weights as numbers", "not there", "no number", "zeros"],
)
def test_what_is_no_question_of_weights_is_left_as_it_is(
    made: ComparedRows, weights: WeightFit | None, unit: float
) -> None:
    assert decide_by_weights(made, weights, unit) is made


STEP, BACKWARD, MOVED = Step(1), Backward(1), WeightsMoved(1, optimizers=(0,))


def check(*events: Event, launcher: tuple[str, ...] = (), **closing: Any) -> None:
    with TemporaryDirectory() as folder:
        storage = Storage(Path(folder))
        for event in events:
            storage.event(event)
        storage.finish(ClosingRecord(**closing))
        job = Job(Command("t.py", launcher=launcher), "full", 2, folder=folder)
        check_updates(Child(job), RecordedRun("full", Path(folder), 0.0))


def said(*events: Event, **closing: Any) -> str:
    """What is said of a run with these events, empty where it trained."""
    try:
        check(*events, **closing)
    except ProblemError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("closing", "helps"),
    [
        ({"unseen": UnseenCalls(processes=2)}, "`--launcher python`"),
        ({"unseen": UnseenCalls(elsewhere=4)}, "`nn.Parameter`"),
        ({"unseen": UnseenCalls({"torch.func": 3})}, "`.grad`"),
        ({}, "neither a backward pass nor an optimizer step; give arguments"),
        ({"ending": Ending.EXIT, "exit_code": "0"}, "sys.exit(0)"),
    ],
)
def test_a_run_without_a_step(closing: dict[str, Any], helps: str) -> None:
    text = said(**closing)
    assert helps in text and "reached no optimizer step" in text
    assert text.count("\n") == 1


def test_processes_of_a_launcher_are_recorded() -> None:
    assert "--launcher" not in said(launcher=("python",), unseen=UnseenCalls(processes=2))


def test_passes_or_steps_alone_ask_for_other_arguments() -> None:
    assert "backward passes, but no optimizer step; give arguments" in said(BACKWARD, unseen=UnseenCalls(processes=2))
    assert said(STEP).endswith("give arguments with which it trains for at least one update")
    assert said(BACKWARD, STEP) == said(STEP, had_gradients=True) == "", "it trained"


@pytest.mark.parametrize(
    ("events", "closing", "words"),
    [
        ((BACKWARD,), {"keeps_no_gradients": True}, "let `.grad` add them up until the weights move"),
        ((BACKWARD, STEP), {"keeps_no_gradients": True}, "by gradients that no `.grad` holds"),
        ((BACKWARD, MOVED), {"optimizers": ("SGD",)}, "its `SGD` never steps; let a `torch.optim` optimizer"),
    ],
)
def test_what_cannot_be_compared_is_no_error(events: tuple[Event, ...], closing: dict[str, Any], words: str) -> None:
    """The script trains, but by gradients that were not seen."""
    with pytest.raises(Uncompared, match=re.escape(words)):
        check(*events, **closing)


def test_processes_are_counted() -> None:
    before = started_processes()
    process = multiprocessing.get_context("spawn").Process(target=int)
    assert started_processes() == before + 1
    process.close()
