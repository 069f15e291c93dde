"""Controls of the bench, of a part of the batch, and what confirms them on the whole."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measured
import problems_backward
import problems_coupling
import problems_state
import problems_statistics
import problems_weights
import pytest
import torch
import torch.nn.functional as F
from problems import Case, Problem, fault_codes, mlp, squared_error, story
from torch import nn
from torch.nn.functional import cross_entropy

import gaverify
from gaverify import Finding, Outcome, Verdict
from gaverify.cli import main
from gaverify.errors import ProblemError
from gaverify.passes import dispatch
from gaverify.passes.experiment import Experiment, Placement
from gaverify.passes.isolation import ModelState
from gaverify.passes.layouts import SampleDimension, SampleLayout
from gaverify.passes.randomness import DealingReport, DrawLedger, Reading
from gaverify.records.comparison import NotCompared
from gaverify.records.experiment import ControlKind, ControlRun, WeightFit
from gaverify.records.facts import Facts, Repeatability
from gaverify.records.windows import AccumulationWindow
from gaverify.search import confirming, investigation, operations, proof, weights
from gaverify.search.bench import Bench, Intervention, find_needed
from gaverify.search.trace import traces
from gaverify.search.trace.traces import GroupedFingerprints, Result
from gaverify.thresholds import (
    CAPPED_UNITS,
    CORRECT_FLOAT32,
    FEW_TIMES,
    FEW_UNITS,
    SAME_IN_FLOAT32,
    SAME_ORDER,
    SHOWS_UNITS,
    U32,
    U64,
)
from gaverify.verdict import measurement
from gaverify.verdict.criteria import Difference

# A divergence is judged and searched on a part of the batch, and confirmed on all of it; else the whole batch is.


_FAMILIES = (
    problems_backward,
    problems_coupling,
    problems_weights,
    problems_state,
    problems_statistics,
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
    monkeypatch.setattr(measurement, "WORTH", 0)


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


def difference(size: float, reference: float) -> Difference:
    return Difference("w", (3,), reference, reference, size, None, None)


WHOLE, PART = 1.0, 0.5  # the norms of the gradients: the whole's is twice that of its part
LEAST = SHOWS_UNITS * U32  # a part of a quarter of each micro-batch shows twice the difference of samples


@pytest.mark.parametrize(
    ("shown", "apart", "here", "few", "told"),
    [
        (Outcome.DIVERGENT, 1.0, 0.6 / SAME_ORDER, None, Outcome.DIVERGENT),
        (Outcome.DIVERGENT, 1.0, 0.4 / SAME_ORDER, None, None),
        (Outcome.DIVERGENT, 10 * U32, 1.1 * LEAST, None, Outcome.DIVERGENT),
        (Outcome.DIVERGENT, 10 * U32, 0.9 * LEAST, None, None),
        (Outcome.DIVERGENT, 10 * U32, 0.9 * LEAST, "few samples", Outcome.DIVERGENT),
        (Outcome.INCONCLUSIVE, 1.0, 1.0, None, None),
        (Outcome.EQUIVALENT, 1e-7, 0.9e-7 * FEW_TIMES, None, Outcome.EQUIVALENT),
        (Outcome.EQUIVALENT, 1e-7, 1.1e-7 * FEW_TIMES, None, None),
    ],
)
@pytest.mark.parametrize("beside", [True, False], ids=["beside another that diverges", "alone"])
def test_a_parameter_is_decided_by_a_part_where_it_shows_the_same(
    shown: Outcome, apart: float, here: float, few: Any, told: Outcome | None, beside: bool
) -> None:
    """`apart` is the part's relative difference, `here` the whole's; alone, an equivalent part decides nothing."""

    def judged(outcome: Outcome, size: float, norm: float) -> Any:
        sizes = {"w": size * norm} | ({"other": norm} if beside else {})
        rows = [
            measured.row(name, norm, norm, each)._replace(outcome=Outcome.DIVERGENT if name == "other" else outcome)
            for name, each in sizes.items()
        ]
        working = {name: difference(each, norm) for name, each in sizes.items()}
        micro_batches = (16, 16) if norm == WHOLE else (4, 4)
        experiment = SimpleNamespace(sizes=micro_batches)
        measurement = SimpleNamespace(experiment=experiment, differences=working, coarse_unit=U32)
        return measurement, SimpleNamespace(rows=rows, few=few, float64=object())

    whole, of_part = judged(Outcome.INCONCLUSIVE, here, WHOLE), judged(shown, apart, PART)
    rows = investigation._decide_by_first_samples(*whole, *of_part)
    expected = told if beside or told is Outcome.DIVERGENT else None
    assert (rows[0].outcome if rows is not None else None) is expected
    of_part[1].float64 = None
    assert investigation._decide_by_first_samples(*whole, *of_part) is None, "float64 did not run"


DRAWN = DrawLedger(draws=(object(),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drawn", "reading", "whole_doubts", "doubts", "loss", "alone"),
    [
        (DrawLedger(), Reading(), False, False, 1.0, True),
        (DRAWN, Reading(by_contents=True), False, False, 1.0, True),
        (DRAWN, Reading(by_contents=True), False, True, 1.0, True),
        (DRAWN, Reading(), True, True, 1.0, True),
        (DRAWN, Reading(), False, True, 1.0, False),
        (DrawLedger(), Reading(), False, False, math.nan, False),
    ],
    ids=[
        "nothing drawn",
        "in the whole's reading",
        "in doubt in the second reading",
        "open to doubt in both",
        "in the part alone",
        "no target in it",
    ],
)
def test_a_part_is_judged_by_float64_alone(
    monkeypatch: pytest.MonkeyPatch,
    drawn: DrawLedger,
    reading: Reading,
    whole_doubts: bool,
    doubts: bool,
    loss: float,
    alone: bool,
) -> None:
    """Its differences in working precision are the whole's, to scale: half of them here."""
    given: list[Any] = []
    rows = {"w": difference(0.3, 0.3), "b": difference(0.4, 0.4)}
    accumulated = SimpleNamespace(micro_losses=(1.0, loss), draws=DealingReport(ambiguous=doubts))
    passes = SimpleNamespace(loss=loss), accumulated

    def control(experiment: Any, make_watch: Any) -> Any:
        given.append(experiment)
        return SimpleNamespace(rows=rows, full=passes[0], accumulated=passes[1])

    class First:
        """The first samples as an experiment."""

        def __init__(self, draws: DrawLedger, reading: Reading) -> None:
            self.draws, self.reading = draws, reading

        def record(self) -> Any:
            return First(DRAWN, Reading()), None

        def with_second_reading(self) -> Any:
            return First(self.draws, Reading(by_contents=True))

    monkeypatch.setattr(investigation, "run_in_float64", control)
    monkeypatch.setattr(investigation, "measure_and_decide", lambda *_, **__: "in both")
    working = {"w": difference(1.0, 0.6), "b": difference(0.0, 0.8)}
    whole: Any = SimpleNamespace(
        experiment=SimpleNamespace(draws=drawn, reading=reading),
        accumulated=SimpleNamespace(draws=DealingReport(ambiguous=whole_doubts)),
        differences=working,
        plain_terms={"w": 0.0, "b": 8.0},
        coarse_unit=U32,
    )
    first: Any = First(DrawLedger(), Reading())
    decision: Any = SimpleNamespace(few=None)
    found: Any = investigation._judge_first_samples(first, whole, decision, None)
    assert bool(given[0].draws.count) is bool(drawn.count)
    assert given[0].reading.by_contents is reading.by_contents
    if not alone:
        assert found == "in both"
        return
    measurement, decided = found
    assert measurement.differences == {} and measurement.full is passes[0]
    allowed = [row.allowed for row in decided.rows]
    assert allowed == pytest.approx([math.sqrt(U64 / U32) * 0.5, CAPPED_UNITS * U32 * 4.0])
    decision.few = "below float32"
    below: Any = investigation._judge_first_samples(first, whole, decision, None)
    assert below[0].differences == {} and below[1].rows == decided.rows


@pytest.mark.parametrize(
    ("own", "here", "looks"),
    [(1e-12, 0.9, False), (1e-12, 1.1, True), (1e-3, 0.9, True)],
    ids=["a gradient that is zero", "that is more than rounding here", "a gradient that is none"],
)
def test_what_rounds_a_gradient_that_is_zero_is_known_without_a_pass(
    monkeypatch: pytest.MonkeyPatch, own: float, here: float, looks: bool
) -> None:
    looked: list[object] = []
    seen = {"w": difference(1e-4, 1.0), "zero": difference(1e-9, 0.0)}
    monkeypatch.setattr(investigation, "_measure_in_working_precision", lambda *given: looked.append(given) or seen)
    least = FEW_UNITS * U32
    differences = {"w": difference(1e-4, 1.0), "zero": difference(here * least, here * least)}
    whole: Any = SimpleNamespace(differences=differences, coarse_unit=U32)
    rows = [measured.row("w", 1.0, 1.0, 0.1), measured.row("zero", own, own, 0.0)]
    of_part: Any = SimpleNamespace(experiment=None, differences={})
    found: Any = SimpleNamespace(rows=rows)
    rounds = investigation._bound_rounding(whole, of_part, found)
    assert rounds("zero") == pytest.approx(FEW_TIMES * 1e-9 if looks else least)
    assert rounds("w") == pytest.approx(FEW_TIMES * 1e-4) and len(looked) == 1


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    ("changes", "why", "unit", "size"),
    [
        ({}, None, U32, 4),
        ({}, NotCompared.UNUSED, U32, 4),
        ({"weighting": [0.25] * 4}, None, U32, None),
        ({}, NotCompared.MISSING_IN_ACCUMULATED, U32, None),
        ({"sizes": (4, 4), "batch_size": 7}, None, U32, None),
        ({}, None, 2.0**-8, None),
        ({"autocast": torch.bfloat16}, None, U32, None),
    ],
)
def test_a_part_is_like_the_whole_or_there_is_none(
    changes: dict[str, Any], why: NotCompared | None, unit: float, size: int | None
) -> None:
    model, batch = nn.Linear(3, 1), (torch.randn(16, 3), torch.randn(16, 1))
    experiment = Experiment(
        problem=Problem(model, squared_error, batch),
        parameters=dict(model.named_parameters()),
        modules=[model],
        state=ModelState([model]),
        placement=Placement((torch.device("cpu"),)),
        **{"batch_size": 16, "sizes": (4,) * 4, **changes},
    )
    measurement: Any = SimpleNamespace(experiment=experiment, coarse_unit=unit)
    decision: Any = SimpleNamespace(rows=[measured.row(why=why)], few=None)
    found = investigation._take_first_samples(measurement, decision)
    assert (found.batch_size if found is not None else None) == size


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("name", ("A01", "A11", "B01", "B02", "B11", "D03", "C02", "hard-examples"))
def test_a_part_finds_what_the_whole_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case: Case = _CASES[name]
    part = gaverify.verify(case.build(), steps=case.steps, **case.options)
    monkeypatch.setattr(measurement, "WORTH", 1 << 60)
    whole = gaverify.verify(case.build(), steps=case.steps, **case.options)
    assert said(part) == said(whole), story(part)
    assert {row.name for row in part.divergent} == {row.name for row in whole.divergent}


@pytest.mark.parametrize(("name", "again"), [("A01", False), ("A11", False), ("B01", False), ("masked-mean", True)])
def test_the_whole_is_the_second_batch_of_what_a_part_shows_but_for_numbers_without_a_meaning(
    name: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, told = _CASES[name], []

    def runs() -> list[str]:
        told.clear()
        gaverify.verify(case.build(), steps=case.steps, progress=lambda what, *_: told.append(what), **case.options)
        return told

    assert "a second batch" in runs()
    monkeypatch.setattr(measurement, "WORTH", 0)
    assert ("a second batch" in runs()) == again, told


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of samples of the batches that questions are asked of; the whole one's come after a confirmation."""
    sizes: list[int] = []

    def noted(bench: Bench, facts: Facts) -> Facts:
        sizes.append(bench.experiment.batch_size)
        return facts

    monkeypatch.setattr(investigation, "QUESTIONS", (noted, *investigation.QUESTIONS))
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


# What counts as rounding in a control run: less where no float64 was possible and the difference itself is small.


def bench(total: float, dtype: torch.dtype = torch.float32, *, lift: torch.dtype | None = None) -> Bench:
    model = nn.Linear(2, 1, dtype=dtype, device="cpu")
    problem = Problem(model, lambda m, b: m(b).mean(), torch.ones(4, 2, dtype=dtype, device="cpu"))
    experiment = Experiment(
        problem=problem,
        parameters=dict(model.named_parameters()),
        modules=[model],
        state=ModelState([model]),
        batch_size=4,
        sizes=(2, 2),
        placement=Placement((torch.device("cpu"),)),
        lift=lift,
    )
    return Bench(experiment, total=total)


@pytest.mark.parametrize(
    ("total", "rounding"),
    [(0.5, 1e-4), (3e-4, 3e-6), (1e-5, 16 * 2.0**-24)],
)
def test_an_eighth_of_a_small_difference_is_not_rounding(total: float, rounding: float) -> None:
    """A loss with a moving mean and deviation: restored, 4e-5 of 3e-4 stay, which are real."""
    assert bench(total).rounding == pytest.approx(rounding)


def test_float64_leaves_less_whatever_the_difference_is() -> None:
    assert bench(3e-4, torch.float64).rounding == bench(0.5, lift=torch.float64).rounding == 4 * 2.0**-24
    assert bench(3e-4, torch.float64).experiment.is_float64, "its weights are"
    assert not bench(1e-9).experiment.is_float64, "how small it is does not make it exact"


# --- Release one by one: what is needed stays, what is not goes, and nothing is run that tells nothing ---------------


def _enough(needed: set[int], runs: list[list[int]]) -> Callable[[list[int]], ControlRun]:
    def control(some: list[int]) -> ControlRun:
        runs.append(some)
        missing = len(needed - set(some))
        return ControlRun("held", 0.1 * missing, missing == 0)

    return control


@pytest.mark.parametrize("needed", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
@pytest.mark.parametrize("size", [4, 9, 17])
def test_what_is_needed_stays(needed: set[int], size: int) -> None:
    found = find_needed(list(range(size)), _enough(needed, []))
    assert {entry.item for entry in found} == needed


def test_what_something_makes_alone_is_noted() -> None:
    found = find_needed([0, 1, 2], _enough({0, 2}, []))
    assert [(entry.item, entry.alone) for entry in found] == [(0, pytest.approx(0.1)), (2, pytest.approx(0.1))]


def test_of_two_that_are_enough_the_last_stays() -> None:
    def control(some: list[str]) -> ControlRun:
        return ControlRun("held", 0.0, bool(some))

    assert [entry.item for entry in find_needed(["attribute", "buffer"], control)] == ["buffer"]


def test_what_is_kept_is_released_for_its_number_alone() -> None:
    runs: list[list[int]] = []
    found = find_needed([0, 1], _enough({1}, runs), keep=lambda item: item == 0)
    assert [entry.item for entry in found] == [0, 1]
    assert math.isnan(found[0].alone)
    assert found[1].alone == pytest.approx(0.1)


def test_a_run_that_is_impossible_keeps_the_item() -> None:
    assert [entry.item for entry in find_needed([0, 1], lambda _: None)] == [0, 1]


def test_what_stays_neutralised_beside_the_items_may_be_enough() -> None:
    assert find_needed([7], _enough(set(), [])) == []
    assert [entry.item for entry in find_needed([7], _enough({7}, []))] == [7]


def test_many_things_are_halved() -> None:
    runs: list[list[int]] = []
    found = find_needed(list(range(64)), _enough({40}, runs))
    assert [entry.item for entry in found] == [40]
    assert len(runs) <= 14


# --- What a part of the batch showed is looked for on the whole where it is one thing, told without a doubt ----------


CONTROL = ControlRun("with the weights that fit", 1e-9, True, kind=ControlKind.RESULT_PINNED)
FOUND = measured.divergent(weight_remedy=CONTROL, cleared=True, left=1e-9)
NOT_ALONE = replace(FOUND, forward=replace(FOUND.forward, causes=(measured.cause(control=CONTROL),)))
DOUBTFUL = {
    "something is left": replace(FOUND, cleared=False),
    "forwards that do not repeat": replace(FOUND, repeatability=Repeatability(1e-5, 0.0)),
    "backwards that do not repeat": replace(FOUND, repeatability=Repeatability(0.0, 1e-5)),
    "nobody asked whether they repeat": replace(FOUND, repeatability=None),
    "draws that matter": replace(FOUND, draws=replace(FOUND.draws, control=CONTROL)),
    "gradients that a forward clears": replace(FOUND, backward=replace(FOUND.backward, kept=CONTROL)),
    "two causes": NOT_ALONE,
    "a control that leaves something": replace(
        FOUND, window=replace(FOUND.window, remedy=replace(CONTROL, rounding=False))
    ),
    "a control that failed": replace(FOUND, window=replace(FOUND.window, remedy=None, failure="no room")),
}


class Asked(Bench):
    """A bench that says that it was asked."""

    def __init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> None:
        raise AssertionError("the whole batch was run")


@pytest.mark.parametrize("why", DOUBTFUL)
def test_what_is_doubtful_in_the_part_is_not_looked_for_on_the_whole(why: str) -> None:
    assert confirming.confirm_on_batch(Asked(), FOUND, DOUBTFUL[why]) is None


def test_one_thing_is() -> None:
    with pytest.raises(AssertionError, match="the whole batch was run"):
        confirming.confirm_on_batch(Asked(), FOUND, FOUND)


class Leaving(Bench):
    """A bench on which every control leaves as much."""

    leaves = 0.0

    def run(self, *interventions: Intervention, fit: bool = False, exactly: bool = True) -> ControlRun:
        return ControlRun(interventions[-1].what, self.leaves, self.leaves <= self.rounding)


@pytest.mark.parametrize(
    ("dtype", "floor", "most"),
    [(torch.float64, 0.0, CAPPED_UNITS * U32), (torch.float32, 0.0, CORRECT_FLOAT32), (torch.float32, 1e-2, 1e-2)],
)
@pytest.mark.parametrize("times", [0.9, 1.1])
def test_a_cause_is_confirmed_where_no_more_is_left_than_correct_models_show(
    dtype: torch.dtype, floor: float, most: float, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Leaving, "leaves", times * most)
    control = replace(measured.HELPED, interventions=(Intervention("held"),))
    part = measured.divergent(state=measured.changed("mean", control=control), cleared=True, left=1e-9)
    on_all = Leaving(bench(1.0, dtype).experiment, total=1.0, floor=floor)
    assert (confirming.confirm_on_batch(on_all, FACTS, part) is not None) is (times < 1)


EXACT = SimpleNamespace(is_float64=True)


def confirms(confirm: Any, found: Facts, **bench: Any) -> bool:
    """Whether one of the ways to confirm something tells more than was known of the whole batch."""
    defaults = {"rounding": 1e-6, "floor": 0.0, "experiment": EXACT, "reference": None, "total": 1.0}
    known: Any = SimpleNamespace(**{**defaults, **bench})
    return confirm(known, FACTS, found) is not FACTS


FACTS = measured.divergent(left=1.0, micro_losses=(1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(("times", "told"), [(0.9, True), (1.1, False)])
def test_weights_of_the_part_are_those_of_the_whole_by_what_they_mean(times: float, told: bool) -> None:
    """Seven of 55 valid targets there, one of three here; they have to explain the whole batch's gradient, too."""
    sketches: Any = SimpleNamespace(full=torch.zeros(1), left_by=lambda weights: times * 1e-3)
    known = AccumulationWindow((0.25,) * 4, "uniform", (16,) * 4, valid_targets=(7.0, 16.0, 16.0, 16.0))
    there = WeightFit((1 / 3, 2 / 3), 1e-9, used=(0.5, 0.5))
    part = AccumulationWindow((0.5, 0.5), "uniform", (2, 2), valid_targets=(1.0, 2.0), fit=there)
    found = confirming._translate_fit(WeightFit((0.1, 0.3, 0.3, 0.3), 0.1), sketches, known, part, 1e-3)
    assert (found.weights if found is not None else None) == ((7 / 55, 16 / 55, 16 / 55, 16 / 55) if told else None)


@pytest.mark.parametrize("times", [0.9, 1.1])
def test_the_backward_is_confirmed_where_the_losses_agree(times: float) -> None:
    loss = 1.0 / (1 + times * SAME_IN_FLOAT32)
    reference = SimpleNamespace(full=SimpleNamespace(loss=loss))
    part = replace(FOUND, backward=replace(FOUND.backward, control=CONTROL))
    told = confirms(confirming._confirm_backward, part, reference=reference, run=lambda *_: CONTROL)
    assert told is (times < 1)


@pytest.mark.parametrize(
    ("repair", "told"),
    [
        (replace(measured.HELPED, left=0.9e-6), True),
        (replace(measured.HELPED, left=1.1e-6), False),
        (replace(measured.HELPED, rounding=False), False),
        (None, False),
    ],
)
def test_a_cause_is_confirmed_where_its_repairs_come_out_as_in_the_part(
    monkeypatch: pytest.MonkeyPatch, repair: ControlRun | None, told: bool
) -> None:
    before = measured.cause(remedies=(measured.HELPED,))
    again = replace(before, remedies=() if repair is None else (repair,))
    monkeypatch.setattr(proof, "rerun_cause", lambda *_: again)
    part = replace(FOUND, forward=replace(FOUND.forward, causes=(before,)))
    assert confirms(confirming._confirm_cause, part) is told


def test_a_second_batch_that_the_loss_refuses_leaves_the_proof_as_it_is() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0][:, 0].unique()) < len(batch[0]):
            raise ValueError("the same sample twice")
        return F.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Centred(), nn.Linear(8, 3))
    verdict = gaverify.verify(model, loss, (torch.randn(16, 6), torch.randint(3, (16,))))
    assert [(each.code, each.proven) for each in verdict.findings] == [("GAV102", True)], story(verdict)


def test_the_noise_of_a_part_is_that_of_the_whole_to_scale() -> None:
    """A quarter of the samples, of a gradient that is three times as long."""
    fit = WeightFit((0.5, 0.5), 0.4, noise=0.2)
    part = measured.divergent(rows=(measured.row("w", 3.0, 3.0, 0.1),), fit=fit, batch_size=8)
    whole = measured.divergent(rows=(measured.row("w", 1.0, 1.0, 0.1),), batch_size=32)
    found = confirming._scale_fit(whole, part)
    assert found is not None and (found.weights, found.samples) == ((), 8)
    assert found.noise == pytest.approx(0.2 * 0.5 * 3.0)


@pytest.mark.parametrize(("before", "again", "apart"), [(1.0, 1.0, 0.0), (1.0, 1.5, 0.5), (0.0, 0.0, math.inf)])
def test_a_first_micro_batch_without_a_gradient_does_not_tell_that_it_repeats(
    monkeypatch: pytest.MonkeyPatch, before: float, again: float, apart: float
) -> None:
    monkeypatch.setattr(weights, "sketch", lambda *_: torch.tensor([again]))
    monkeypatch.setattr(weights, "replace", lambda value, **_: value)
    found = SimpleNamespace(gradients={"w": None}, micro_losses=(2.0,))
    bench: Any = SimpleNamespace(
        experiment=SimpleNamespace(sizes=(2, 2), micro_batches=lambda *_: found, ranks=None), possible=lambda ask: ask()
    )
    reference: Any = SimpleNamespace(
        shares=SimpleNamespace(columns=torch.tensor([[before, 1.0]])), full=None, losses=(2.0,)
    )
    twice = weights._repeat_first(bench, reference)
    assert (twice.forward, twice.backward) == (apart if apart == math.inf else 0.0, apart)


@pytest.mark.parametrize("kind", [ControlKind.STATE_PINNED, ControlKind.STATE_RESTORED])
@pytest.mark.parametrize("leaves", [(), ("all",), ("some",)])
def test_state_is_confirmed_where_what_was_blamed_is_enough(kind: ControlKind, leaves: tuple[str, ...]) -> None:
    """Of pinned state the control pins all of it, and what is blamed has to be enough as well."""
    runs: list[str] = []

    def run(intervention: Intervention) -> ControlRun:
        runs.append("all" if intervention is control else "some")
        return replace(measured.HELPED, kind=intervention.kind, rounding=runs[-1] not in leaves)

    control = Intervention("all of it", kind)
    found = measured.changed("mean", "count", control=replace(measured.HELPED, kind=kind, interventions=(control,)))
    found = replace(found, blamed=found.changes[:1])
    is_pinned = kind is ControlKind.STATE_PINNED
    # what a first control leaves is told
    told = confirms(confirming._confirm_state, replace(FOUND, state=found), run=run)
    assert told is not (is_pinned and leaves == ("some",))
    assert runs == (["all", "some"] if is_pinned and leaves != ("all",) else ["all"])


@pytest.mark.parametrize(
    ("meant", "meaning", "alike", "told"),
    [(True, True, False, True), (False, True, True, False), (False, False, True, True), (False, False, False, False)],
)
def test_weights_without_a_meaning_are_tried_where_those_of_the_part_had_none(
    monkeypatch: pytest.MonkeyPatch, meant: bool, meaning: bool, alike: bool, told: bool
) -> None:
    for name, answer in (("is_meaningful", meant), ("has_meaning", meaning), ("is_explanation", alike)):
        monkeypatch.setattr(weights, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(weights, "try_weights", lambda _, facts, fit: replace(facts, left=0.0))
    assert confirms(confirming._confirm_weights, FOUND) is told


# Which line counts: the loss, and never what is the same for every batch; none where the recipe itself is wrong.


GIVEN = [0.2575, 0.25, 0.25, 0.25]


class Positions(nn.Module):
    """Embedded positions are the same in every micro-batch, and so add up with weights whose sum is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(12, 8), nn.Embedding(5, 8), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(tokens) + self.places(torch.arange(5)))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())  # planted here


def found(ignored: bool, weighting: Any) -> Finding:
    torch.manual_seed(0)
    tokens = torch.randint(12, (8, 5))
    labels = tokens.masked_fill(torch.arange(5) > torch.arange(8)[:, None] // 2, -100) if ignored else tokens
    verdict = gaverify.verify(Problem(Positions(), loss, (tokens, labels)), steps=4, weighting=weighting)
    (finding,) = verdict.findings
    assert (finding.code, finding.proven) == ("GAV202", True)
    return finding


def test_weights_given_for_micro_batches_that_are_alike_are_no_matter_of_the_model() -> None:
    finding = found(False, GIVEN)
    assert finding.location is None
    assert "the given weights" in finding.summary


def test_the_loss_counts_whatever_the_weights_add_up_to() -> None:
    with open(__file__, encoding="utf-8") as lines:
        line = next(at for at, text in enumerate(lines, 1) if text.rstrip().endswith("# planted here"))
    for weighting in (GIVEN, "none", "uniform"):
        location = found(True, weighting).location
        assert location is not None and location.line == line


# --- A fault of gaverify's own leaves with its own exception; what the model, the loss or a kernel raises is told ----


SINGLE = torch.ones(1)  # a constant of the user's module, so that the control meets float32 beside float64


def planted(*_: Any, **__: Any) -> Any:
    raise TypeError("planted")


@pytest.mark.parametrize(
    ("room", "name"),
    [
        (operations, "trace_divergences"),
        (traces, "real_numbers"),
        (proof, "PinnedResults"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_in_a_probe_is_no_finding(room: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, name, planted)
    with pytest.raises(TypeError, match="planted"):
        gaverify.verify(problems_coupling.hand_written_batch_norm(), steps=4)


def test_a_fault_in_the_mode_is_no_error_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_SLICE", None)  # multiplied by a number, by the observer of sums
    with pytest.raises(TypeError, match="unsupported operand"):
        gaverify.verify(problems_coupling.batch_norm(), steps=4)


def test_a_fault_in_the_float64_control_is_no_missing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> torch.Tensor:
        raise ValueError("planted")  # Python turns a TypeError in an operator into one of its own

    monkeypatch.setattr(dispatch, "_raise_precision", wrong)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x).mean() * SINGLE).square().sum()

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="planted"):
        gaverify.verify(Problem(mlp(), loss, torch.randn(16, 6)), steps=4)


def test_the_command_line_leaves_with_70(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operations, "trace_divergences", planted)
    assert main(["run", "--model", "mlp-batchnorm", "--steps", "4"]) == 70
    printed = capsys.readouterr()
    assert "GAV000" not in printed.out
    assert "bug in gaverify, not in your model" in printed.err


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise TypeError("in the user's backward")


def _in_forward(model: nn.Module, batch: Any) -> torch.Tensor:
    raise TypeError("in the user's loss")


def _in_a_kernel(model: nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, (batch[0], batch[1].view(-1, 7)))


def _in_a_draw(model: nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, batch) * torch.randint(5, 2, (1,))


def _in_python_s_generator(model: nn.Module, batch: Any) -> torch.Tensor:
    import random

    return squared_error(model, batch) * random.choice([])


def _in_backward(model: nn.Module, batch: Any) -> torch.Tensor:
    return Raising.apply(squared_error(model, batch))


@pytest.mark.parametrize(
    "loss",
    [_in_forward, _in_a_kernel, _in_a_draw, _in_python_s_generator, _in_backward],
    ids=lambda loss: loss.__name__,
)
def test_what_the_users_code_raises_is_told(loss: Any) -> None:
    batch = torch.randn(16, 6), torch.randn(16, 4)
    with pytest.raises(ProblemError, match="the model or loss raised on the full batch"):
        gaverify.verify(Problem(mlp(), loss, batch), steps=4)


def test_what_a_weighting_raises_is_told() -> None:
    problem = problems_weights.mean_loss()
    with pytest.raises(ProblemError, match="no weight today"):
        gaverify.verify(problem, steps=4, weighting=lambda _: (_ for _ in ()).throw(TypeError("no weight today")))


def test_a_kernel_without_float64_is_no_fault_of_ours() -> None:
    """The float64 control raises in the user's code; the noise floor decides then."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype is torch.float64:
                raise NotImplementedError("no kernel for double")
            return self.layer(x)

    torch.manual_seed(0)
    problem = Problem(Single(), squared_error, (torch.randn(16, 6), torch.randn(16, 4)))
    verdict = gaverify.verify(problem, steps=4, weighting="none")
    assert verdict.method == "noise-floor"
    assert fault_codes(verdict) == {"GAV201"}


def describe(*tensors: torch.Tensor, at: int = 0, fold: int = 1) -> list[Result]:
    """The results with fingerprints of tensors whose samples lie in one dimension."""
    fingerprints, results = GroupedFingerprints(), []
    for tensor in tensors:
        results.append(Result(tuple(tensor.shape), True))
        fingerprints.add(results[-1], tensor, SampleLayout((SampleDimension(at, fold),)))
    fingerprints.read()
    return results


def test_a_tensor_has_the_fingerprints_it_had_when_it_was_added_alone_or_in_a_group() -> None:
    first, second, third = torch.randn(3, 6, 5).unbind()
    for fold in (1, 2):
        fingerprints, results = GroupedFingerprints(), [Result((6, 5), True) for _ in range(3)]
        for result, tensor in zip(results, (first, second, third), strict=True):
            changed = tensor.clone()
            fingerprints.add(result, changed, SampleLayout((SampleDimension(0, fold),)))
            changed.zero_()  # as an operation in place does
        fingerprints.read()
        for result, tensor in zip(results, (first, second, third), strict=True):
            (alone,) = describe(tensor, fold=fold)
            assert result.prints is not None and result.prints.shape == (fold, 6 // fold, 3)
            torch.testing.assert_close(result.prints, alone.prints)
            torch.testing.assert_close(result.moments, alone.moments)


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_a_fold_that_does_not_divide_the_rows_has_no_fingerprint(rows: int) -> None:
    without, with_prints = describe(torch.ones(rows, 2), torch.ones(2 * rows, 2), fold=2)
    assert without.prints is None and with_prints.prints is not None


def test_a_result_with_fewer_dimensions_than_its_plan_has_no_fingerprint() -> None:
    assert describe(torch.ones(4), at=1)[0].prints is None
    assert describe(torch.tensor(1.0), fold=2)[0].prints is None


@pytest.mark.parametrize(
    ("options", "code"), [({"weighting": "none"}, "GAV201"), ({"weighting": (0.3, 0.2, 0.25, 0.25)}, "GAV202")]
)
def test_a_control_that_ran_out_of_memory_keeps_the_finding(
    options: dict[str, Any], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*_: Any) -> Any:
        raise ProblemError("out of memory on cpu while running the full batch")

    monkeypatch.setattr(weights, "run_fitted_weights", without_memory)
    verdict = gaverify.verify(problems_weights.mean_loss(), steps=4, **options)
    assert fault_codes(verdict) == {code}
    (finding,) = [finding for finding in verdict.findings if finding.code == code]
    assert not finding.proven
    assert any("no control run was possible (out of memory on cpu" in e.statement for e in finding.evidence)
