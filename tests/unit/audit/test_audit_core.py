"""The audit's rules on hand-written loops: each fires on its fault and stays quiet on the twin. No process, no torch.

A loop is a letter per call: `B` backward, `S` step, `H` a step with gradients that were set by hand, `Z` zero_grad, `C`
a clipping that changed gradients, `c` one that did not, `L` scheduler, `U` unscale_, `A` average of the weights, `M`
parameters moved by hand, `E` the script's end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from measured import ranks
from updates import update_of

from gaverify.audit.controls import control_overwriting
from gaverify.audit.outcome import is_explained, report_of, same_arguments
from gaverify.audit.request import OPTIONS, Request
from gaverify.errors import SpecError
from gaverify.records.audit import (
    Calls,
    ControlResults,
    Overwritten,
    Record,
    RowCheck,
    SettingDifference,
    Stage,
    StageComparison,
    UpdateComparison,
)
from gaverify.records.audit_report import Audit
from gaverify.records.comparison import comparison_of
from gaverify.records.events import (
    ArithmeticSummary,
    AverageUpdate,
    Backward,
    Clipping,
    ClosingRecord,
    End,
    Ending,
    Event,
    Forward,
    Framework,
    FrameworkLoop,
    GradientsEdited,
    Ledger,
    ModelSummary,
    ScalerCall,
    SchedulerStep,
    Step,
    TrainedGroup,
    TrainedParameter,
    WeightsMoved,
    ZeroGrad,
    ledger_of,
)
from gaverify.records.experiment import Cause, ControlKind, ControlRun, LossTerm, Operation, Suspect, WeightFit
from gaverify.records.findings import Finding, Location
from gaverify.records.outcomes import NotCompared, Outcome, ParameterComparison
from gaverify.records.ranks import RankFacts
from gaverify.records.windows import windows_of
from gaverify.rules import findings_for as findings_of
from gaverify.rules.rule import explain_rest
from gaverify.rules.scale import constant
from gaverify.rules.shares import find_share, weigh_total
from gaverify.spec.options import read_words
from gaverify.spec.values import QUOTED

KINDS: Mapping[str, Callable[..., Event]] = {
    "B": partial(Backward, optimizers=(0,)),
    "S": Step,
    "H": partial(Step, by_hand=True),
    "Z": partial(ZeroGrad, optimizers=(0,)),
    "C": partial(Clipping, active=True),
    "c": Clipping,
    "L": partial(SchedulerStep, scheduler=1, lr=(0.1,)),
    "U": partial(ScalerCall, call="unscale_"),
    "A": AverageUpdate,
    "e": partial(GradientsEdited, optimizers=(0,), factors=(0.25,)),
    "f": partial(GradientsEdited, optimizers=(0,), factors=(0.7,)),
    "v": partial(GradientsEdited, optimizers=(0,), factors=(None,)),
    "M": partial(WeightsMoved, optimizers=(0,)),
    "E": partial(End, reason=Ending.SCRIPT),
}
LINES = {letter: line for line, letter in enumerate(KINDS, 10)}
RIGHT = "BBBBSZ BBBBSZ"


def loop(text: str, rows: int = 2) -> list[Event]:
    """Events of a loop; each backward follows a forward of so many rows."""
    events: list[Event] = []
    update, stepped = 1, False
    for letter in text.replace(" ", ""):
        if letter == "B":
            update, stepped = update + stepped, False
            events.append(Forward(update, "train.py", 9, rows=rows, model=0))
        events.append(KINDS[letter](update, "train.py", LINES[letter]))
        stepped = stepped or letter in "SH"
    return events


def record(text: str, full: str = "", **fields: Any) -> Record:
    """Two runs; that with the right weights is the full batch's, unless `fields` say otherwise."""
    events, whole = loop(text), loop(full, 8)
    results = {each.name: fields.pop(each.name) for each in dataclasses.fields(ControlResults) if each.name in fields}
    controls = ControlResults(**{"weighted_run": ControlRun("each loss multiplied", 1e-7, True), **results})
    calls = {each.name: fields.pop(each.name) for each in dataclasses.fields(Calls) if each.name in fields}
    calls = {"full_windows": windows_of(whole), "full_ledger": ledger_of(whole), **calls}
    return Record(Calls(windows_of(events), ledger_of(events), **calls), **{"controls": controls, **fields})


def with_results(loop: Record, **results: Any) -> Record:
    """A record with other results of controls."""
    return replace(loop, controls=replace(loop.controls, **results))


def findings_for(loop: Record) -> tuple[Finding, ...]:
    return findings_of(comparison_of(loop))


def judge(*updates: UpdateComparison, text: str = RIGHT, full: str = "BSZ BSZ", **fields: Any) -> tuple[Finding, ...]:
    """Findings on a loop whose updates compare like these; its calls are in the right order unless others are given."""
    return findings_for(record(text, full, updates=updates, **fields))


def answer(loop: Record, **options: Any) -> Audit:
    request = Request(script="train.py", full=("--a",), accumulated=("--b",), **options)
    return report_of(request, loop, findings_for(loop), (), CLOSING, {})


def faults(found: tuple[Finding, ...]) -> list[str]:
    return [finding.code for finding in found if finding.severity == "fault"]


def parameter(ratio: float = 1.0, outcome: Outcome | None = None, **fields: Any) -> ParameterComparison:
    outcome = outcome or (Outcome.EQUIVALENT if ratio == 1 else Outcome.DIVERGENT)
    values = {
        "name": "weight",
        "shape": (4,),
        "outcome": outcome,
        "method": "noise-floor",
        "reference_norm": 1.0,
        "accumulated_norm": ratio,
        "difference_norm": abs(ratio - 1),
        "allowed": 1e-5,
        "working_difference_norm": abs(ratio - 1),
        "worst": None,
        **fields,
    }
    return ParameterComparison(**values)


def update(number: int = 1, ratio: float = 1.0, **fields: Any) -> UpdateComparison:
    outcome = Outcome.EQUIVALENT if ratio == 1 else Outcome.DIVERGENT
    values: dict[str, Any] = {"judged": True, "data": RowCheck(8, 8), "steps": 4, "sizes": (2, 2, 2, 2), **fields}
    return update_of(number, outcome=outcome, parameters=(parameter(ratio),), **values)


def fit(
    factor: float = 1.0,
    left: float = 1e-7,
    right: tuple[float, ...] = (1.0,) * 4,
    residual: float = 1e-7,
    used: tuple[float, ...] = (1.0,) * 4,
) -> WeightFit:
    return WeightFit(right, residual, True, used=used, used_residual=1e-7, factor=factor, factor_residual=left)


UNEQUAL = (0.4, 0.8, 1.2, 1.6)
FOUR = fit(4.0, right=(0.25,) * 4)
STRANGE = fit(0.9, 0.4, residual=0.3)  # no weights explain it


class TestWindows:
    def test_a_window_without_a_step_is_not_complete(self) -> None:
        assert [window.complete for window in windows_of(loop("BBSZ BB E"))] == [True, False]

    def test_a_right_loop_loses_nothing(self) -> None:
        assert ledger_of(loop(RIGHT)) == Ledger((), ())

    def test_backward_passes_that_another_optimizer_uses_are_not_lost(self) -> None:
        """A GAN: the generator's backward also reaches the discriminator, which clears that."""
        both = Backward(1, optimizers=(0, 1))
        assert ledger_of([both, Step(1, optimizer=1), ZeroGrad(2, optimizers=(0,))]).lost == ()

    def test_a_skipped_step_of_a_scaler_loses_nothing(self) -> None:
        skipped = ScalerCall(1, call="step", skipped=True)
        events = [*loop("BB"), skipped, ZeroGrad(1, optimizers=(0,)), *loop("BBSZ")]
        assert ledger_of(events).lost == ()


EVENT_FAULTS = [
    ("steps at i = 0", "BSZ BBBBSZ BBBBSZ", "", {}, "GAV601", "S"),
    ("steps every time", "BSZ BSZ BSZ BSZ", "BSZ BSZ BSZ BSZ", {"numbers": (2, 4)}, "GAV601", "S"),
    ("steps every time, K given", "BSZ BSZ BSZ", "", {"steps": 4}, "GAV601", "S"),
    ("decays by hand", "BMBMBMBSZ", "", {}, "GAV601", "M"),
    ("each micro-batch climbs (SAM)", "BMZBBMZBBMZBBMZBSZ", "BMZBSZ", {}, "GAV601", "M"),
    ("never cleared", "BBBBS BBBBS", "", {}, "GAV602", "S"),
    ("an epoch's tail leaks", "BBBBSZ BBBBBBSZ", "", {"steps": 4}, "GAV602", "S"),
    ("cleared inside", "ZBZBZBZBS ZBZBZBZBS", "", {}, "GAV603", "Z"),
    ("cleared just before the step", "BBBBZS BBBBZS", "BSZ BSZ", {}, "GAV603", "Z"),
    ("cleared just before the step, in both runs", "BBBBZS BBBBZS", "BZS BZS", {}, "GAV603", "Z"),
    ("cleared just before the step, calls alone", "BBBBZS BBBBZS", "", {}, "GAV603", "Z"),
    ("steps inside, clears at the end", "BSBSBSBSZ BSBSBSBSZ", "BSZ BSZ", {}, "GAV601", "S"),
    ("steps inside, calls alone", "BSBSBSBSZ BSBSBSBSZ", "", {}, "GAV601", "S"),
    ("the first window is short by one", "BBBSZ BBBBSZ BBBBSZ", "BSZ BSZ BSZ", {}, "GAV601", "S"),
    ("steps twice per window", "BBSBBSZ BBSBBSZ", "BSZ BSZ", {}, "GAV601", "S"),
    ("clears every second window", "BBBBSBBBBSZ BBBBSBBBBSZ", "BSZ BSZ", {}, "GAV602", "S"),
    ("cleared in the middle", "BBZBBSZ BBZBBSZ", "", {"steps": 4}, "GAV603", "Z"),
    ("cleared twice before each pass", "ZZBZBZBZBS ZZBZBZBZBS", "ZZBS ZZBS", {}, "GAV603", "Z"),
    ("an epoch's tail is cleared", "BBBBSZ BBZBBBBSZ", "", {}, "GAV604", "Z"),
    ("the script ends", "BBBBSZ BB E", "", {}, "GAV604", "B"),
    ("clips inside", "BCBCBCBCSZ", "", {}, "GAV606", "C"),
    ("schedules inside", "BLBLBLBSZL", "", {}, "GAV607", "L"),
    ("unscales inside", "BUBUBUBUSZ", "", {}, "GAV608", "U"),
]


@pytest.mark.parametrize("case", EVENT_FAULTS, ids=lambda case: case[0])
def test_a_faulty_order_of_calls_is_named_with_its_line(case: tuple[Any, ...]) -> None:
    _, text, full, fields, code, letter = case
    found = findings_for(record(text, full, **fields))
    assert faults(found) == [code]
    assert found[0].location is not None and found[0].location.line == LINES[letter]


QUIET = [
    ("the usual loop", RIGHT, "BSZ BSZ", {}),
    ("with K given", RIGHT, "", {"steps": 4}),
    ("cleared first", "ZBBBBS ZBBBBS", "ZBS ZBS", {}),
    ("no accumulation", "BSZ BSZ BSZ", "", {}),
    ("a short last window", "BBBBSZ BBSZ BBBBSZ", "", {"steps": 4}),
    ("clips once", "BBBBCSZ BBBBCSZ", "BCSZ BCSZ", {}),
    ("schedules once", "BBBBSLZ BBBBSLZ", "BSLZ BSLZ", {}),
    ("unscales once", "BBBBUSZ BBBBUSZ", "BUSZ", {}),
    ("decays by hand once", "BBBBMSZ BBBBMSZ", "BMSZ", {}),
    ("a perturbed step (SAM) that K = 1 has too", "BMZBSZ BMZBSZ", "BMZBSZ BMZBSZ", {}),
    ("gradients summed by hand, calls alone", "BZBZBZBZH BZBZBZBZH", "", {"steps": 4}),
    ("stopped inside a window", "BBBBSZ BB", "BSZ", {}),
    # two micro-batches of two against eight rows: nothing says that four were meant
    ("arguments for another batch", "BBSZ BBSZ", "BSZ BSZ", {"numbers": (2, 2)}),
]


@pytest.mark.parametrize("case", QUIET, ids=lambda case: case[0])
def test_a_right_order_of_calls_is_quiet(case: tuple[Any, ...]) -> None:
    _, text, full, fields = case
    assert findings_for(record(text, full, **fields)) == ()


@pytest.mark.parametrize(("text", "code"), [("BcBcBcBcSZ", "GAV606"), ("BABABABSZA", "GAV402")])
def test_clipping_that_never_clips_and_an_average_inside_are_notes(text: str, code: str) -> None:
    (found,) = findings_for(record(text))
    assert (found.code, found.severity) == (code, "note")
    assert code not in faults(judge(update(ratio=1.1, fit=STRANGE), text=text, full="BSZ"))


@pytest.mark.parametrize(
    ("weights", "text", "found"),
    [
        ([0.25] * 10, "BBBBSZ BBBBSZ BBSZ", ["GAV605"]),
        ([0.25] * 8 + [0.5] * 2, "BBBBSZ BBBBSZ BBSZ", []),
        ([0.25] * 8 + [None] * 2, "BBBBSZ BBBBSZ BBSZ", []),
        ([1.0] * 10, "BBBBSZ BBBBSZ BBSZ", []),
        ([0.25] * 10, "BBSZ BBBBSZ BBBBSZ", ["GAV602"]),  # tells no number to divide by
    ],
    ids=["by k all the same", "by two", "unknown", "by nothing", "the first window is the short one"],
)
def test_by_what_the_losses_of_a_short_window_are_divided(weights: list[Any], text: str, found: list[str]) -> None:
    """Where calls alone are looked at."""
    known = iter(weights)
    events = [replace(event, weight=next(known)) if isinstance(event, Backward) else event for event in loop(text)]
    assert faults(findings_for(Record(Calls(windows_of(events), ledger_of(events))))) == found


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("BSZ BSZ BBSZ BBBSZ BBBBSZ BBBBSZ", "note"),
        ("BSZ BSZ BBBBSZ BBBBSZ", "fault"),
        ("BSZ BBBSZ BBSZ BBBBSZ", "fault"),
    ],
    ids=["grows", "two sizes", "grows and shrinks"],
)
def test_accumulation_that_is_warmed_up_is_meant(text: str, severity: str) -> None:
    found = findings_for(record(text, steps=4))
    assert ("GAV601", severity) in {(finding.code, finding.severity) for finding in found}
    assert len({finding.severity for finding in found if finding.code == "GAV601"}) == 1


class TestWeights:
    @pytest.mark.parametrize(("factor", "said"), [(4.0, "(= K):"), (0.25, "(= 1/K):"), (1.5, "1.5 times")])
    def test_one_factor_is_a_wrong_scale(self, factor: float, said: str) -> None:
        (found,) = judge(update(ratio=factor, fit=fit(factor, right=(1 / factor,) * 4)))
        assert found.code == "GAV201" and said in found.summary and found.proven

    @pytest.mark.parametrize(
        ("ratio", "others", "codes"),
        [
            (4.0, (parameter(),), ["GAV201"]),
            (0.25, (parameter(),), ["GAV201"]),
            (1.7, (parameter(),), []),
            (4.0, (), []),
            (4.0, (parameter(), parameter(1.0, Outcome.INCONCLUSIVE)), []),
        ],
        ids=["K", "1/K", "another", "nothing agrees", "one is open"],
    )
    def test_a_factor_of_some_parameters_alone(
        self, ratio: float, others: tuple[ParameterComparison, ...], codes: list[str]
    ) -> None:
        """S06: a scale that every micro-batch's loss uses, over features of the whole batch."""
        rows = (*others, parameter(ratio, name="logit_scale"))
        found = judge(replace(update(ratio=ratio, fit=STRANGE), parameters=rows))
        assert faults(found) == codes
        assert not codes or ("`logit_scale`" in found[0].summary and "1 other parameter agrees" in found[0].summary)

    @pytest.mark.parametrize(
        ("used", "right", "codes"),
        [
            ((1.0, 0.0, 1.0, 0.0), (0.5, 0.5, 0.5, 0.5), ["GAV000"]),
            ((1.0, 0.0, 1.0, 0.0), (0.2, 0.2, 0.3, 0.3), ["GAV000"]),
            ((1.0, 1.0, 1.0, 1.0), (0.5, 0.5, 0.5, 0.5), ["GAV201"]),
        ],
        ids=["of rank 0 alone", "of rank 0 alone, unequal", "of both ranks"],
    )
    def test_a_rank_that_lacks_the_others_has_no_loss_scale(
        self, used: tuple[float, ...], right: tuple[float, ...], codes: list[str]
    ) -> None:
        """What is taken before a script reduces by hand: weights fit, and another loss scale changes nothing."""
        differs = update(ratio=1.5, fit=fit(1.5, 0.7, right=right, used=used), steps=2)
        assert [found.code for found in judge(differs, ranks=2)] == codes

    def test_a_short_window_over_k_is_its_own_fault(self) -> None:
        updates = (update(), update(2, 0.5, steps=2, fit=fit(0.5, right=(2.0, 2.0), used=(1.0, 1.0))))
        events = loop("BBBBSZ BBSZ")
        short = Record(Calls(windows_of(events), ledger_of(events), windows_of(loop("BBSZ BSZ", 4))), updates)
        (found,) = findings_for(short)
        assert found.code == "GAV605" and "K = 4" in found.summary

    @pytest.mark.parametrize(("count", "code"), [(2, "GAV605"), (6, "GAV201")])
    def test_a_window_is_short_where_it_has_fewer_micro_batches(self, count: int, code: str) -> None:
        factor = count / 4
        scaled = update(2, factor, steps=count, fit=fit(factor, right=(1 / factor,) * count, used=(1.0,) * count))
        found = record(RIGHT, "BSZ BSZ", updates=(update(), scaled), steps=4)
        weights = weigh_total(comparison_of(found), scaled)
        assert weights is not None and find_share(weights).code == code

    @pytest.mark.parametrize(
        ("targets", "sizes", "said"),
        [((1, 2, 3, 4), (2,) * 4, "valid targets"), ((), (1, 2, 3, 4), "n_k/N"), ((), (2,) * 4, "countable targets")],
    )
    def test_unequal_weights_are_named(self, targets: tuple[int, ...], sizes: tuple[int, ...], said: str) -> None:
        (found,) = judge(update(ratio=1.2, fit=fit(0.97, 0.3, UNEQUAL), valid_targets=targets, sizes=sizes))
        assert found.code == "GAV202"
        weights = found.evidence[1]
        assert weights.values["weights"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
        assert said in weights.statement
        # targets that nobody saw may well be unequal: to weigh the micro-batches alike would be the fault itself
        assert "same weight" not in found.remedy and "0.4, 0.8, 1.2, 1.6" in found.remedy

    @pytest.mark.parametrize(
        ("right", "used", "losses", "full", "code"),
        [
            (UNEQUAL, (1.0,) * 4, (0.5, 1.0, 1.5, 2.0), 5.0, "GAV104"),
            ((0.25,) * 4, (1.0,) * 4, (0.5, 1.0, 1.5, 2.0), 5.0, "GAV104"),
            # a scaler's 1024 is taken out before the step
            (UNEQUAL, (2**-10,) * 4, (512.0, 1024.0, 1536.0, 2048.0), 5.0, "GAV104"),
            # losses that weigh wrongly as well, and losses that say nothing: all are alike, one is not known
            (UNEQUAL, (1.0,) * 4, (0.5, 1.0, 1.5, 2.0), 6.0, "GAV202"),
            (UNEQUAL, (1.0,) * 4, (1.0,) * 4, 4.0, "GAV202"),
            (UNEQUAL, (1.0,) * 4, (0.5, 1.0, math.nan, 2.0), 5.0, "GAV202"),
            ((0.25,) * 4, (1.0,) * 4, (0.5, 1.0, 1.5, 2.0), 1.25, "GAV201"),
        ],
    )
    def test_weights_are_blamed_unless_the_losses_add_up_without_them(
        self, right: tuple[float, ...], used: tuple[float, ...], losses: tuple[float, ...], full: float, code: str
    ) -> None:
        is_one_factor = len(set(right)) == 1
        explained = fit(1 / right[0] if is_one_factor else 0.97, 1e-7 if is_one_factor else 0.3, right, used=used)
        differs = update(ratio=1.2, fit=explained, losses=losses, full_loss=full)
        assert faults(judge(differs)) == [code]

    def test_weights_of_the_script_itself_are_not_called_averages(self) -> None:
        """`loss / (i % K + 1)`: equal micro-batches that the script counts unequally."""
        (found,) = judge(update(ratio=1.8, fit=fit(1.5, 0.4, (0.25, 0.5, 0.75, 1.0)), valid_targets=(2,) * 4))
        assert found.code == "GAV202" and "equal size" in found.summary

    def test_losses_that_are_not_divided_either_are_multiplied_by_shares(self) -> None:
        """Clipping after the window changes nothing of it: the sum before it was fitted."""
        both = update(ratio=4.1, fit=fit(4.0, 0.1, right=(0.1, 0.2, 0.3, 0.4)), valid_targets=(1, 2, 3, 4))
        scale, shares = judge(both, text="BBBBCSZ BBBBCSZ", full="BCSZ BCSZ")
        assert shares.code == "GAV202" and "0.1, 0.2, 0.3, 0.4" in shares.remedy
        assert scale.code == "GAV201" and "add up to 4 instead of 1 (= K)" in scale.summary

    @pytest.mark.parametrize(("counts", "codes"), [((1, 2, 3, 4), 1), ((1, 1, 1, 37), -1)])
    def test_the_larger_of_two_faults_comes_first(self, counts: tuple[int, ...], codes: int) -> None:
        """Divided by K twice: 0.75 of the gradient is lost, and the shares of 1, 1, 1 and 37 are 1.35 off."""
        right = tuple(16 * count / sum(counts) for count in counts)
        both = update(ratio=0.3, fit=fit(0.3, 0.5, right=right), valid_targets=counts)
        assert faults(judge(both)) == ["GAV201", "GAV202"][::codes]

    @pytest.mark.parametrize("total", [1, 4])
    def test_the_factors_of_a_term_are_said_to_be_those_of_the_term(self, total: int) -> None:
        right = tuple(4 * count / 10 / total for count in (1, 2, 3, 4))
        terms = LossTerm(1, 2, fit()), LossTerm(2, 2, fit(0.9 * total, 0.3, right=right))
        differs = update(ratio=1.2, fit=STRANGE, valid_targets=(1, 2, 3, 4))
        found = {each.code: each for each in judge(differs, terms=terms)}
        assert "multiply term 2 by " in found["GAV202"].remedy and "the losses by" not in found["GAV202"].remedy
        assert ("GAV201" in found) == (total > 1)
        assert total == 1 or "add up to 4 instead of 1 in term 2 of 2" in found["GAV201"].summary

    def test_a_micro_batch_without_targets_has_no_weight(self) -> None:
        """Nothing tells the weight of a gradient of zeros: the others' are the shares all the same."""
        right = replace(fit(2.0, 0.3, right=(1.0, 0.4, 1.0, 0.6)), determined=False)
        empty = update(ratio=2.0, fit=right, valid_targets=(0, 2, 0, 3), ignored_targets=True)
        found_by_code = {found.code: found for found in judge(empty)}
        found = found_by_code["GAV202"]
        assert "add up to 4 instead of 1" in found_by_code["GAV201"].summary
        assert found.evidence[1].values["weights"] == pytest.approx([0.0, 0.4, 0.0, 0.6])
        assert "shares of valid targets" in found.evidence[1].statement

    @pytest.mark.parametrize(("right", "said"), [(0.4, []), (1.6, ["add up to 0.25 instead of 1"])])
    def test_divided_losses_are_not_called_undivided(self, right: float, said: list[str]) -> None:
        shares = tuple(right * count for count in (1, 2, 3, 4))
        *scales, found = judge(update(ratio=1.2, fit=fit(0.9, 0.3, shares), valid_targets=(1, 2, 3, 4)))
        assert found.code == "GAV202"
        assert [text in scale.summary for text, scale in zip(said, scales, strict=True)] == [True] * len(said)

    @pytest.mark.parametrize(
        ("times", "proven"), [(1.0, True), (0.25, True), (4.0, True), (0.86, False), (3.43, False)]
    )
    def test_weights_that_add_up_to_no_mean_may_be_a_number_that_moves(self, times: float, proven: bool) -> None:
        """A moving average divides by 90, 81, 74 and 66: a mean of counts would make up for K, 1 or 1/K in all."""
        counted = (90.0, 81.0, 74.0, 66.0)
        right = tuple(4 * times * count / sum(counted) for count in counted)
        moved = update(ratio=1.2, fit=fit(0.9, 0.3, right=right), divisors=counted)
        (found,) = (each for each in judge(moved) if each.code == "GAV202")
        assert found.proven is proven
        assert ("multiply the losses by" in found.remedy) is proven
        assert ("a moving average fits as well" in found.evidence[1].statement) is not proven

    @pytest.mark.parametrize("right", [(0.25,) * 4, (0.1, 0.2, 0.3, 0.4)])
    @pytest.mark.parametrize("weighed", [None, ControlRun("each loss multiplied", 0.3, False)])
    def test_weights_that_only_fit_are_suspected(self, right: tuple[float, ...], weighed: ControlRun | None) -> None:
        """What a script makes of other losses, with its state and its hooks, a fit cannot see."""
        factor, left = (4.0, 1e-7) if right[0] == right[1] else (4.0, 0.1)
        differs = update(ratio=4.0, fit=fit(factor, left, right=right), valid_targets=(1, 2, 3, 4))
        for run, proven in ((weighed, False), (ControlRun("each loss multiplied", 1e-7, True), True)):
            found = judge(differs, weighted_run=run)
            assert {each.proven for each in found} == {proven}, found
            assert ("gaverify ran it: equivalent" in found[-1].remedy) == proven, found

    @pytest.mark.parametrize(("right", "runs"), [((1.2, 1.2 - 1e-8, 1.0, 0.6), False), ((4.0, 3.0, 2.0, 1.0), True)])
    def test_weights_fall_by_more_than_rounding_where_passes_overwrite(
        self, right: tuple[float, ...], runs: bool
    ) -> None:
        """Passes with as many samples have equal weights: which is the larger one differs between processors."""
        differs = update(ratio=1.2, fit=fit(0.9, 0.3, right=right))
        trial: Any = SimpleNamespace(full=None, run=None, control=lambda *_, **__: pytest.fail("ran"))
        with pytest.raises(pytest.fail.Exception, match="ran") if runs else nullcontext():
            control_overwriting(trial, record(RIGHT, "BSZ BSZ", updates=(differs,)))

    def test_a_running_sum_repeats_micro_batches(self) -> None:
        (found,) = judge(update(ratio=2.1, fit=fit(1.5, 0.4, right=(1e-8, -2e-8, 3e-8, 1.0))))
        assert found.code == "GAV202" and "repeats" in found.summary and "e-08" not in found.remedy

    @pytest.mark.parametrize(
        ("counts", "factor", "codes"),
        [
            ((0, 4, 4, 4), fit(0.75, right=(1.0, 4 / 3, 4 / 3, 4 / 3)), ["GAV203"]),
            ((0, 1, 3, 5), fit(0.9, 0.3, right=(1.0, 4 / 9, 4 / 3, 20 / 9)), ["GAV202", "GAV203"]),
        ],
        ids=["equal", "unequal"],
    )
    def test_an_empty_micro_batch_is_named(self, counts: tuple[int, ...], factor: WeightFit, codes: list[str]) -> None:
        assert faults(judge(update(ratio=0.75, fit=factor, valid_targets=counts, ignored_targets=True))) == codes

    @pytest.mark.parametrize(("left", "proven"), [(1e-7, True), (0.1, False)])
    def test_an_empty_micro_batch_is_proven_where_weights_without_it_leave_nothing(
        self, left: float, proven: bool
    ) -> None:
        factor = fit(0.75, 0.3, right=(1.0, 4 / 3, 4 / 3, 4 / 3), residual=2 * left)
        empty = update(ratio=0.75, fit=factor, valid_targets=(0, 4, 4, 4), ignored_targets=True)
        weighed = ControlRun("each loss multiplied", left, proven)
        found = [each for each in judge(empty, weighted_run=weighed) if each.code == "GAV203"]
        assert [finding.proven for finding in found] == [proven]
        tried = [entry.values["left"] for entry in found[0].evidence if entry.label == "control"]
        assert tried == ([left] if proven else []), "what the run left, not what the fit did"

    @pytest.mark.parametrize(("ranks", "said"), [(2, True), (1, False)])
    def test_terms_that_ranks_leave_untried_are_said(self, ranks: int, said: bool) -> None:
        loop = record(RIGHT, "BSZ BSZ", updates=(update(ratio=1.2, fit=STRANGE),), ranks=ranks)
        events = loop.calls.windows[0].events
        sums = [replace(event, terms=2) if isinstance(event, Backward) else event for event in events]
        first, *later = loop.calls.windows
        loop = replace(loop, calls=replace(loop.calls, windows=(replace(first, events=tuple(sums)), *later)))
        (found,) = findings_for(loop)
        assert ("2 terms of the loss were not tested" in str(found.evidence)) == said

    @pytest.mark.parametrize("residual", [0.3, 1e-16])
    def test_weights_that_fit_and_repair_nothing_are_not_ruled_out(self, residual: float) -> None:
        """Two differentiations per micro-batch, as in PCGrad: there are as many weights as gradients."""
        differs = update(
            ratio=1.5, fit=fit(1.5, 0.7, right=(0.2, 0.2, 0.3, 0.3), used=(1.0, 0.0) * 2, residual=residual)
        )
        (found,) = judge(replace(differs, window=replace(differs.window, steps=2)), ranks=2)
        assert (found.code, found.severity) == ("GAV000", "note")
        assert ("weights: the best ones" in str(found.evidence)) == (residual == 0.3)

    def test_gradients_that_the_script_sums_itself_are_not_lost(self) -> None:
        """Megatron's `main_grad`: what is cleared has been added to a buffer."""
        assert judge(update(), update(2), text="BZBZBZBZS BZBZBZBZS", full="BZS BZS") == ()
        assert faults(judge(update(ratio=4.0, fit=FOUR), text="BZBZBZBZS", full="BZS")) == ["GAV201"]

    @pytest.mark.parametrize(
        ("ratio", "right", "codes"),
        [(0.3, 1.0, {"GAV603"}), (0.9, 0.25, {"GAV603", "GAV201"})],
        ids=["cleared", "undivided as well"],
    )
    def test_a_cleared_window_needs_no_other_cause(self, ratio: float, right: float, codes: set[str]) -> None:
        lost = fit(ratio, 0.5, used=(0.0, 0.0, 0.0, 1.0), right=(right,) * 4)
        assert set(faults(judge(update(ratio=ratio, fit=lost), text="ZBZBZBZBS", full="ZBS"))) == codes

    @pytest.mark.parametrize(
        ("ratio", "left", "codes", "proven"),
        [
            (None, 0.0, ["GAV606"], False),
            (1.0, 1e-7, ["GAV606"], True),
            (1.2, 1e-7, ["GAV606", "GAV202"], True),
            (1.2, 0.3, ["GAV606"], False),
        ],
        ids=["no control", "nothing left", "a mean of means as well", "something else as well"],
    )
    def test_clipping_inside_explains_what_goes_without_it(
        self, ratio: float | None, left: float, codes: list[str], proven: bool
    ) -> None:
        """Clipping changes the weights that fit: those of a control without it are looked at."""
        clipped = update(ratio=0.9, fit=fit(0.9, 0.4, right=(1.0, 1.2, 1.4, 1.8)))
        without = fit(1.1, 0.2, right=(1.0, 1.2, 0.8, 1.1), residual=left)
        small = () if ratio is None else (update(ratio=ratio, fit=without),)
        found = judge(clipped, text="BCBCBCBCSZ", full="BCSZ", unclipped=small)
        assert faults(found) == codes and found[0].proven is proven
        assert found[0].summary.startswith("gradients are clipped 4 times in update 1, 3 of them before")

    @pytest.mark.parametrize(("left", "codes"), [(4.0, ["GAV101", "GAV201"]), (None, ["GAV101"])])
    def test_a_missing_division_beside_samples_that_meet(self, left: float | None, codes: list[str]) -> None:
        """Once the statistics are held, one factor is left."""
        run = ControlRun("`1` in evaluation mode", 3.0, False, None if left is None else fit(left, right=(0.25,) * 4))
        suspect = Suspect("rows", Operation("BatchNorm1d", "1", "BatchNorm1d"), None, 0.5, 4, True, True)
        cause = Cause(replace(suspect, statistics=True), run, explained=0.3)
        found = judge(update(ratio=4.5, fit=STRANGE), coupling=(cause,))
        assert faults(found) == codes and found[0].proven is (left is not None)

    def test_clipping_before_the_division_is_no_wrong_scale(self) -> None:
        stages = (StageComparison(Stage.UNCLIPPED, Outcome.EQUIVALENT, 1e-8, 1.0),)
        early = update(ratio=0.25, fit=fit(0.25, right=(4.0,) * 4), stages=stages)
        clipped = partial(judge, early, text="BBBBCSZ", full="BCSZ", unclipped=(update(fit=fit()),))
        (found,) = clipped()
        assert (found.code, found.proven) == ("GAV606", True) and "before" in found.summary
        assert "GAV606" not in faults(clipped(together=ranks(None))), "before ranks are reduced it is GAV706"

    @pytest.mark.parametrize(
        ("text", "code", "in_ranks"),
        [
            ("BeBfBeBS", "GAV606", True),
            ("BvBvBvBS", "GAV606", False),  # what ranks reduce by hand is no clipping
            ("BBBfBS", "GAV606", True),
            ("BeBeBeBS", "GAV202", False),
            ("BBBeBS", "GAV202", False),
            ("BBBBeS", "GAV202", False),
        ],
        ids=["by norm", "by value", "once", "divided every time", "divided by K once", "after the window"],
    )
    def test_clipping_by_hand_inside_is_told_from_dividing(self, text: str, code: str, in_ranks: bool) -> None:
        differs = update(ratio=0.9, fit=fit(0.9, 0.4, right=(1.0, 1.2, 1.4, 1.8)))
        assert faults(judge(differs, text=text + "Z", full="BSZ")) == [code]
        several = judge(differs, text=text + "Z", full="BSZ", together=ranks(None))
        assert ("GAV606" in faults(several)) is in_ranks

    def test_gradients_edited_inside_a_window_that_agrees_are_no_fault(self) -> None:
        assert judge(update(), text="BeBfBeBSZ", full="BSZ") == ()

    @pytest.mark.parametrize(
        ("undone", "codes", "sum_"),
        [
            (FOUR, ["GAV601", "GAV201"], "4 times the full batch's gradient"),
            (fit(0.9, 0.4, right=(1.0, 1.2, 1.4, 1.8)), None, "the full batch's gradient if each has the right loss w"),
        ],
        ids=["undivided", "unequal"],
    )
    def test_an_early_step_is_proven_by_the_run_with_steps_undone(
        self, undone: WeightFit, codes: list[str] | None, sum_: str
    ) -> None:
        found = findings_for(record("BSZ BBBBSZ", "BSZ BSZ", steps_undone=undone))
        assert codes is None or (faults(found) == codes and all(finding.proven for finding in found))
        assert f"sum to {sum_}" in str(found) and "up to a relative difference of 1e-07" in str(found)

    @pytest.mark.parametrize(("numbers", "codes"), [((2, 3), []), ((2, 4), ["GAV601", "GAV201"])])
    def test_steps_undone_join_only_windows_that_were_meant_to_be_one(
        self, numbers: tuple[int, ...], codes: list[str]
    ) -> None:
        """Three micro-batches of two are no four of which one is missing, whatever four together make."""
        undone = fit(4 / 3, right=(0.75,) * 4)
        found = findings_for(record("BBBSZ BBBSZ", "BSZ BSZ", steps_undone=undone, numbers=numbers))
        assert faults(found) == codes

    def test_gradients_that_each_pass_sets_have_no_weights(self) -> None:
        telescoped = fit(0.5, 0.8, right=(4.0, 3.0, 2.0, 1.0))
        differs = record(RIGHT, "BSZ BSZ", updates=(update(ratio=0.5, fit=telescoped),))
        assert faults(findings_for(differs)) == ["GAV202"]
        (found,) = findings_for(with_results(differs, overwritten=Overwritten(0.0, "train.py", 7)))
        assert (found.code, found.proven, found.location) == ("GAV603", True, Location(file="train.py", line=7))

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"fed_alike": True}, "use a `DistributedSampler`, or select the rows by rank"),
            ({"fed_alike": True, "tensor_parallel": True}, "does `--full` give the batch size of one rank?"),
            ({}, "shuffling, a missing seed"),
        ],
    )
    def test_ranks_that_were_fed_the_same_rows_are_told(self, changes: dict[str, bool], words: str) -> None:
        other = update(judged=False, data=RowCheck(8, 8, 3, "argument 1"))
        several = record(RIGHT, "BSZ BSZ", updates=(other,), together=ranks(None, divergent=False, **changes))
        assert words in answer(several).reason

    @pytest.mark.parametrize(("altered", "outcome"), [(0.4, Outcome.INCONCLUSIVE), (1e-7, Outcome.DIVERGENT)])
    def test_a_hook_that_compresses_leaves_a_difference_open(self, altered: float, outcome: Outcome) -> None:
        together = ranks(None, altered=altered)
        report = answer(record(RIGHT, "BSZ BSZ", updates=(update(ratio=1.5, fit=STRANGE),), together=together))
        assert report.outcome is outcome
        assert ("register_comm_hook" in report.reason) is (outcome is Outcome.INCONCLUSIVE)
        assert [found.code for found in report.findings] == ([] if altered > 0.1 else ["GAV000"])
        forgotten = answer(record(RIGHT, "BSZ BSZ", updates=(update(ratio=4.0, fit=FOUR),), together=together))
        assert (forgotten.outcome, faults(forgotten.findings)) == (Outcome.DIVERGENT, ["GAV201"]), "that it excuses not"

    @pytest.mark.parametrize("factor", [1.5, 4.0])
    def test_samples_that_could_not_be_compared_leave_a_difference_open(self, factor: float) -> None:
        """Other rows differ as well; one factor for every parameter is no work of theirs."""
        open_ = factor != 4.0
        differs = update(ratio=factor, fit=STRANGE if open_ else FOUR, data=RowCheck(0, 0, checked=False))
        report = answer(record(RIGHT, "BSZ BSZ", updates=(differs,)))
        assert report.outcome is (Outcome.INCONCLUSIVE if open_ else Outcome.DIVERGENT)
        assert ("cannot check that both runs saw the same samples" in report.reason) is open_
        assert [finding.code for finding in report.findings] == ([] if open_ else ["GAV201"])

    @pytest.mark.parametrize(
        ("facts", "words"),
        [
            (ranks(None, divergent=False, altered=0.4), "this error is in both runs and cannot show"),
            (ranks(None, divergent=False, fed_alike=True, tensor_parallel=True), "rows, which are counted once"),
            (ranks(None, divergent=False, fed_alike=True), "or select the rows by rank"),
            (ranks(None, divergent=False), ""),
        ],
    )
    def test_what_an_equal_gradient_of_ranks_does_not_tell(self, facts: RankFacts, words: str) -> None:
        report = answer(record(RIGHT, "BSZ BSZ", updates=(update(),), together=facts), updates=1)
        assert report.outcome is Outcome.EQUIVALENT and report.reason.endswith(words or "gradients agree to rounding")

    @pytest.mark.parametrize(("accumulated", "told"), [(9, True), (8, False), (16, False)])
    def test_a_sampler_that_fills_up_is_told(self, accumulated: int, told: bool) -> None:
        other = update(judged=False, data=RowCheck(8, accumulated, 1, "argument 1"))
        several = record(RIGHT, "BSZ BSZ", updates=(other,), together=ranks(None, divergent=False), ranks=2)
        reason = answer(several).reason
        assert "1 row of `argument 1` differs" in reason
        assert ("`drop_last=True` leaves them out" in reason) is told

    @pytest.mark.parametrize(
        ("launcher", "trained", "told"), [("torchrun", 1, True), ("torchrun", 2, False), ("", 1, False)]
    )
    @pytest.mark.parametrize("judged", [True, False])
    def test_a_launcher_that_makes_no_ranks_is_told(
        self, launcher: str, trained: int, told: bool, judged: bool
    ) -> None:
        made = update(judged=judged, data=RowCheck(8, 8, 0 if judged else 3, "argument 1"))
        together = ranks(None, divergent=False) if trained > 1 else None
        found = record(RIGHT, "BSZ BSZ", updates=(made,), ranks=trained, together=together)
        reason = answer(found, updates=1, launcher=tuple(launcher.split())).reason
        assert ("trained in one process: no ranks were compared" in reason) is told

    def test_an_update_that_is_not_judged_accuses_nobody(self) -> None:
        assert judge(update(ratio=4.0, fit=fit(4.0), judged=False, data=RowCheck(8, 8, 3, "argument 1"))) == ()


@pytest.mark.parametrize(
    ("apart", "tolerance", "same"), [(5e-5, 1e-5, True), (5e-4, 1e-5, False), (1.5e-3, 1e-3, True), (5e-3, 1e-3, False)]
)
def test_a_fit_magnifies_what_it_is_fitted_to_but_not_without_end(apart: float, tolerance: float, same: bool) -> None:
    assert constant((1.0, 1.0 + apart), tolerance) is same


class TestTerms:
    UNKNOWN = fit(1.1, 0.2, right=(1.0, 1.2, 1.4, 1.8), residual=0.2)
    LOOP = record(RIGHT, "BSZ BSZ", updates=(update(ratio=1.1, fit=UNKNOWN),))
    SHORT = fit(1.02, 0.1, right=(0.8, 1.2, 0.8, 1.2))
    WRONG = LossTerm(2, 2, fit(4.0), False, "train.py", 7)

    def judged(self, *terms: LossTerm) -> tuple[Finding, ...]:
        return findings_for(with_results(self.LOOP, terms=terms))

    def test_a_term_that_counts_k_times_is_named(self) -> None:
        (found,) = self.judged(LossTerm(1, 2, fit()), self.WRONG)
        assert (found.code, found.proven, found.location) == ("GAV201", True, Location(file="train.py", line=7))
        assert "term 2 of 2" in found.summary and "every micro-batch" in found.summary

    def test_a_term_whose_micro_batches_are_weighted_wrongly_is_named(self) -> None:
        found = self.judged(LossTerm(1, 2, self.SHORT), LossTerm(2, 2, fit(), False))
        assert faults(found) == ["GAV202"] and "term 1 of 2" in found[0].summary
        assert sorted(faults(self.judged(LossTerm(1, 2, self.SHORT), self.WRONG))) == ["GAV201", "GAV202"]

    @pytest.mark.parametrize(
        "term",
        [
            LossTerm(1, 2, SHORT, samples=False),
            LossTerm(1, 2, replace(SHORT, vacuous=True)),
            LossTerm(1, 2, replace(SHORT, weights=(), used=())),
            LossTerm(1, 2, replace(SHORT, residual=0.1)),
            LossTerm(1, 2, replace(SHORT, factor=1.0, factor_residual=1e-7)),
        ],
        ids=["a penalty", "fits whatever it is", "not fitted", "not by weights", "one factor"],
    )
    def test_weights_that_explain_no_term_accuse_nobody(self, term: LossTerm) -> None:
        assert faults(self.judged(term)) == []

    @pytest.mark.parametrize(("left", "counted"), [(1e-7, True), (0.2, False)])
    def test_the_other_terms_are_said_to_count_rightly_where_they_do(self, left: float, counted: bool) -> None:
        (found,) = self.judged(LossTerm(1, 2, fit(1.0, left, (1.0, 1.2, 1.4, 1.8), left)), self.WRONG)
        assert ("1 other term has the right weight" in str(found.evidence)) is counted
        assert ("and leave the others as they are" in found.remedy) is counted

    @pytest.mark.parametrize(
        ("left", "samples", "vacuous", "explained"),
        [(0.2, True, False, False), (1e-7, True, False, True), (0.2, False, False, True), (0.2, True, True, True)],
    )
    def test_a_term_that_no_weights_explain_is_left_to_be_looked_into(
        self, left: float, samples: bool, vacuous: bool, explained: bool
    ) -> None:
        other = replace(fit(1.0, left, (1.0, 1.2, 1.4, 1.8), left), vacuous=vacuous)
        assert is_explained(with_results(self.LOOP, terms=(LossTerm(1, 2, other, samples), self.WRONG))) is explained

    @pytest.mark.parametrize(("factor", "said"), [(4.0, "another cause remains"), (1.0, "the control is not exact")])
    def test_a_term_that_counts_wrongly_is_what_an_inexact_control_leaves(self, factor: float, said: str) -> None:
        run = ControlRun("the loss once", 0.1, False, kind=ControlKind.CACHED_GRADIENTS)
        terms = (LossTerm(1, 2, self.UNKNOWN), LossTerm(2, 2, fit(factor), False))
        assert said in explain_rest(comparison_of(with_results(self.LOOP, terms=terms)), run)

    def test_terms_that_are_right_or_not_one_factor_accuse_nobody(self) -> None:
        assert faults(self.judged(LossTerm(1, 2, fit()), LossTerm(2, 2, self.UNKNOWN))) == []


class TestNotes:
    @pytest.mark.parametrize(("ignored", "notes"), [(True, [("GAV901", "note")]), (False, [])])
    def test_equal_counts_of_padded_text_say_little(self, ignored: bool, notes: list[tuple[str, str]]) -> None:
        found = judge(update(valid_targets=(5, 5, 5, 5), ignored_targets=ignored))
        assert [(each.code, each.severity) for each in found] == notes

    @pytest.mark.parametrize(
        ("ratio", "fits", "outcome", "codes"),
        [
            (1.0, STRANGE, Outcome.EQUIVALENT, []),
            (1.5, STRANGE, Outcome.INCONCLUSIVE, [("GAV302", "note")]),
            (
                4.0,
                FOUR,
                Outcome.DIVERGENT,
                [("GAV201", "fault"), ("GAV302", "note")],
            ),  # no excuse
        ],
    )
    def test_unaligned_draws_leave_a_difference_open(
        self, ratio: float, fits: WeightFit, outcome: Outcome, codes: list[tuple[str, str]]
    ) -> None:
        differs = update(ratio=ratio, fit=fits)
        report = answer(record(RIGHT, "BSZ BSZ", updates=(differs,), unaligned={"randperm": "of the batch"}))
        assert [(each.code, each.severity) for each in report.findings] == codes
        assert report.outcome is outcome

    @pytest.mark.parametrize(("full_ranks", "said"), [(2, True), (1, False)])
    def test_a_divergent_answer_tells_what_ranks_in_both_runs_hide(self, full_ranks: int, said: bool) -> None:
        report = answer(record(RIGHT, "BSZ BSZ", updates=(update(ratio=4.0, fit=FOUR),), full_ranks=full_ranks))
        assert report.outcome is Outcome.DIVERGENT
        assert ("both runs trained in 2 ranks, so errors between ranks cannot show" in report.reason) is said

    def test_a_ratio_that_is_no_number_is_left_out(self) -> None:
        """The full batch's gradient is zero, the accumulated one is not: the whole has no norm to be held against."""
        nothing = parameter(name="bias", reference_norm=0.0, accumulated_norm=0.0)
        rows = (nothing, parameter(2.0, reference_norm=0.0))
        differs = replace(update(ratio=4.0, fit=STRANGE), parameters=rows)
        report = answer(record(RIGHT, "BSZ BSZ", updates=(differs,)))
        said = [report.reason, *(e.statement for found in report.findings for e in found.evidence)]
        assert "nan" not in " ".join(said).lower(), said
        assert report.reason.endswith("every gradient of the full-batch run is zero"), report.reason
        assert "every gradient of the full-batch run is zero" in said

    def test_a_gradient_on_one_side_only(self) -> None:
        row = parameter(math.nan, Outcome.DIVERGENT, why=NotCompared.MISSING_IN_ACCUMULATED)
        one_sided = UpdateComparison(1, Outcome.DIVERGENT, True, (row,), RowCheck(8, 8))
        found = record(RIGHT, "BSZ BSZ", updates=(one_sided,))
        another = Step(1, optimizer=1)
        other = replace(found, calls=replace(found.calls, full_windows=windows_of([another, *loop("BSZ BSZ", 8)])))
        for case, said in ((found, "`weight` has"), (other, "different optimizers step")):
            (finding,) = findings_for(case)
            assert (finding.code, finding.proven) == ("GAV502", True) and said in finding.summary

    @pytest.mark.parametrize(("side", "severity"), [("ACCUMULATED", "fault"), ("BOTH", "note")])
    def test_gradients_that_are_not_finite(self, side: str, severity: str) -> None:
        row = parameter(math.nan, Outcome.DIVERGENT, why=NotCompared[f"NOT_FINITE_IN_{side}"])
        update = UpdateComparison(1, Outcome.DIVERGENT, True, (row,), RowCheck(8, 8))
        assert ("GAV503", severity) in [(found.code, found.severity) for found in judge(update)]


CLOSING = ClosingRecord(
    groups=(TrainedGroup((TrainedParameter("0:weight", (4,)),)),),
    optimizers=("SGD",),
    models=ModelSummary(("Linear",)),
    arithmetic=ArithmeticSummary(device="cpu", dtype="float32"),
    torch="2",
)


class TestOutcome:
    def outcome(self, found: Record, **fields: Any) -> tuple[Outcome, str]:
        report = answer(found, **fields)
        return report.outcome, report.reason

    def test_agreeing_updates_are_equivalent(self) -> None:
        outcome, reason = self.outcome(record(RIGHT, "BSZ BSZ", updates=(update(), update(2))))
        assert outcome is Outcome.EQUIVALENT and "updates 1 to 2" in reason

    def test_a_fault_of_the_loop_is_divergent_although_gradients_agree(self) -> None:
        outcome, reason = self.outcome(record("BBBBS BBBBS", "BS BS", updates=(update(), update(2))))
        assert outcome is Outcome.DIVERGENT
        assert reason == "the loop is at fault (GAV602); the backward passes themselves agree"

    def test_a_suspicion_alone_is_no_verdict(self) -> None:
        """The first window may be short on purpose, and the gradients agree."""
        suspected = record("BSZ BBBBSZ BBBBSZ", updates=(update(), update(2)))
        assert [(f.code, f.proven) for f in findings_for(suspected)] == [("GAV601", False)]
        outcome, reason = self.outcome(suspected)
        assert outcome is Outcome.INCONCLUSIVE and "suspected" in reason

    @pytest.mark.parametrize(
        ("updates", "words"),
        [
            ((update(judged=False, data=RowCheck(8, 8, 3, "argument 1")),), ("update 1", "3 rows")),
            ((update(), update(2, judged=False, data=RowCheck(8, 8, 8, "argument 1"))), ("--updates 1",)),
        ],
        ids=["counted", "in a later update"],
    )
    def test_other_samples_are_inconclusive(
        self, updates: tuple[UpdateComparison, ...], words: tuple[str, ...]
    ) -> None:
        outcome, reason = self.outcome(record(RIGHT, "BSZ BSZ", updates=updates))
        assert outcome is Outcome.INCONCLUSIVE and all(word in reason for word in words), reason

    def test_a_run_that_does_not_repeat_itself_is_inconclusive(self) -> None:
        shaky = UpdateComparison(1, Outcome.INCONCLUSIVE, False, (parameter(),), RowCheck(8, 8), unrepeatable="seeds")
        found = record(RIGHT, "BSZ BSZ", updates=(shaky,))
        assert self.outcome(found)[0] is Outcome.INCONCLUSIVE
        assert [f.code for f in findings_for(found)] == ["GAV303"]

    def test_the_same_pieces_compare_nothing(self) -> None:
        same = Record(Calls(windows_of(loop("BSZ", 8)), full_windows=windows_of(loop("BSZ", 8))), (update(steps=1),))
        assert self.outcome(same)[0] is Outcome.INCONCLUSIVE

    @pytest.mark.parametrize(
        ("text", "fields", "code"),
        [
            ("BBBBSZ BBBBSZ", {}, 0),
            ("BABBBSZ", {}, 0),  # a note
            ("BZBZBZBSZ", {}, 1),
            ("BBB", {}, 3),  # no update
            ("BBBBSZ", {"ranks": 2}, 3),  # one of two processes was seen
        ],
    )
    def test_a_gate_can_use_the_exit_code_of_events(self, text: str, fields: dict[str, Any], code: int) -> None:
        found = record(text, full_windows=(), **fields)
        report = answer(found, events_only=True)
        assert report.exit_code == code
        assert code or "not compared" in report.reason, report.reason
        assert report.outcome is (Outcome.DIVERGENT if code == 1 else Outcome.INCONCLUSIVE)

    def test_the_same_arguments_compare_nothing(self) -> None:
        report = same_arguments(Request(script="train.py", full=("--a",), accumulated=("--a",)))
        assert report.outcome is Outcome.INCONCLUSIVE and "are the same, so both runs would be equal" in report.reason


class TestRequest:
    def test_all_problems_are_reported_at_once(self) -> None:
        with pytest.raises(SpecError) as caught:
            Request(script="absent.py", updates=0, steps=0, timeout=math.nan).check()
        assert len(caught.value.problems) == 5

    def test_arguments_are_split_as_a_shell_does(self) -> None:
        assert QUOTED.read("--name 'a b' -k 4") == ("--name", "a b", "-k", "4")

    def test_an_open_quote_is_a_sentence(self) -> None:
        values = read_words(OPTIONS, {"full": "--name 'a"})
        with pytest.raises(SpecError) as caught:
            Request(script=__file__, accumulated=(), **values).check()
        assert caught.value.problems == (
            '--full: must be arguments as in a shell, each quote closed, got "--name \'a"; '
            'write `--full "--batch-size 16 --accum 1"`',
        )


class TestWhatALossCounts:
    """GAV202 says what the fitted weights are; what no loss of torch's counts is read from the division."""

    AMOUNTS = (16.0, 12.0, 14.0, 16.0)

    def found(self, **fields: Any) -> Finding:
        total = sum(self.AMOUNTS)
        right = tuple(amount * 4 / total for amount in self.AMOUNTS)
        differing = update(ratio=1.02, fit=fit(1.02, 0.1, right), **fields)
        return next(found for found in judge(differing, text="BBBBSZ", full="BSZ") if found.code == "GAV202")

    def test_by_what_the_losses_are_divided(self) -> None:
        found = self.found(divisors=tuple(4 * amount for amount in self.AMOUNTS))
        assert "the numbers that the losses are divided by" in found.evidence[1].statement
        assert found.remedy is not None and "divide by the total over all micro-batches (the count" in found.remedy
        other = self.found(divisors=(2.0, 2.0, 2.0, 3.0)).evidence[1].statement
        assert "divided by" not in other and "0.2759, 0.2069, 0.2414, 0.2759" in other

    @pytest.mark.parametrize(
        ("weights", "fields"),
        [
            ((0.375, 0.375, 0.25), {"sizes": (3, 3, 2)}),  # n_k/N
            ((0.2, 0.5, 0.3), {"scales": ((1.0, 0.2, 0.01), (1.0, 0.5, 0.025), (1.0, 0.3, 0.05))}),
            # the same behind a gradient scaler
            ((0.2, 0.5, 0.3), {"scales": ((1.0, 8.0, 1.6), (1.0, 8.0, 4.0), (1.0, 8.0, 2.4))}),
        ],
        ids=["samples", "graph", "scaled"],
    )
    @pytest.mark.parametrize(("moves", "proven"), [(1.0, True), (1.1, False)])
    def test_means_that_the_script_weights_by_other_shares(
        self, weights: tuple[float, ...], fields: Any, moves: float, proven: bool
    ) -> None:
        """Right shares are those of 24, 15 and 5 tokens; a divisor that moves leaves others."""
        tokens = (24.0, 15.0, 5.0)
        right = tuple(moves * count / 44 / weight for count, weight in zip(tokens, weights, strict=True))
        counted = tuple(count / weight for count, weight in zip(tokens, weights, strict=True))
        differing = update(
            ratio=1.02,
            fit=fit(1.02, 0.1, right, used=(1.0,) * 3),
            steps=3,
            divisors=counted,
            **{"sizes": (2, 2, 2), **fields},
        )
        (found,) = judge(differing, text="BBBSZ", full="BSZ")
        assert (found.code, found.proven) == ("GAV202", proven)
        assert ("shares of the numbers" in found.evidence[1].statement) is proven
        assert not proven or found.evidence[1].values["weights"] == pytest.approx([24 / 44, 15 / 44, 5 / 44])

    def test_a_divisor_that_moves_is_no_weight_of_samples(self) -> None:
        """Each loss is divided by a moving average, 1 for the full batch: samples have the right weights."""
        averages = (0.8, 1.3, 1.1)
        weights = tuple(1 / 3 / average for average in averages)
        differing = update(
            ratio=1.02,
            fit=fit(1.02, 0.1, averages, used=(1.0,) * 3),
            steps=3,
            sizes=(2, 2, 2),
            divisors=averages,
            scales=tuple((1.0, weight) for weight in weights),
        )
        (found,) = judge(differing, text="BBBSZ", full="BSZ")
        assert (found.code, found.proven) == ("GAV202", False)


class TestRates:
    """What is said of learning rates that differ at the same update."""

    @pytest.mark.parametrize(
        ("text", "full", "name", "words"),
        [
            ("BBBBSZL BBBBSZL", "BSZL BSZL", "lr", "divided by K"),
            ("BBBBSZ BBBBSZ", "BSZ BSZ", "lr", "count updates"),
            ("BBBBSZLLLL BBBBSZLLLL", "BSZL BSZL", "lr", "count updates"),
            ("BBBBSZL BBBBSZL", "BSZL BSZL", "weight_decay", "count updates"),
        ],
        ids=["another length", "without a schedule", "advances more often", "another setting"],
    )
    def test_a_schedule_that_advances_alike_has_another_length(
        self, text: str, full: str, name: str, words: str
    ) -> None:
        differing = update(2, settings=(SettingDifference(0, 0, name, 0.009, 0.0099),))
        (found,) = (each for each in judge(update(), differing, text=text, full=full) if each.code == "GAV609")
        assert found.remedy is not None and words in found.remedy

    @pytest.mark.parametrize(
        ("rates", "words"),
        [
            ((0.01, 0.01 + 1e-12), None),
            ((0.01, 0.010001), "0.01, in the full-batch run 0.010001"),
            ((0.02, 0.01), "0.02"),
        ],
    )
    def test_values_that_look_alike_are_not_held_against_each_other(
        self, rates: tuple[float, float], words: str | None
    ) -> None:
        differing = update(1, learning_rates=rates[:1], learning_rates_full=rates[1:])
        found = judge(differing, text="BLBLBLBSZL", full="BSZL")
        statement = next(each for each in found if each.code == "GAV607").evidence[0].statement
        assert ("learning rate" in statement) == (words is not None)
        assert words is None or words in statement


ACCELERATE, LIGHTNING = FrameworkLoop(Framework.ACCELERATE, 4), FrameworkLoop(Framework.LIGHTNING, 4)
TRAINER = FrameworkLoop(Framework.TRANSFORMERS, 4, divides=False, counts_items=True)
ONCE, TWICE = ((1.0, 0.25, 0.01),) * 4, ((1.0, 0.25, 0.0625, 0.01),) * 4


class TestFrameworks:
    """Repairs in the words of the framework that runs the loop."""

    def made_by(self, framework: FrameworkLoop | None, **fields: Any) -> Record:
        """An update that differs, whose backward passes a framework runs."""
        loop = record(RIGHT, "BSZ BSZ", updates=(update(ratio=2.0, **fields),))

        def run(event: Event) -> Event:
            return replace(event, framework=framework) if isinstance(event, Backward) else event

        windows = tuple(replace(window, events=tuple(map(run, window.events))) for window in loop.calls.windows)
        return replace(loop, calls=replace(loop.calls, windows=windows))

    @pytest.mark.parametrize(
        ("framework", "scales", "words"),
        [
            (
                ACCELERATE,
                TWICE,
                "remove the script's own division by 4 (equivalent to a loss times 4; gaverify ran it",
            ),
            (LIGHTNING, TWICE, "remove the division by 4 from `training_step`"),
            (replace(TRAINER, divides=True), TWICE, "remove the division by 4 from `compute_loss`"),
            # the script counts the whole window, and has no division to remove
            (ACCELERATE, ONCE, "multiply the loss by 4 if it is already divided by the count over all micro-batches"),
            (LIGHTNING, ONCE, "multiply the loss by 4 if it is already divided by the count over all micro-batches"),
            (replace(TRAINER, divides=True), ONCE, "set its `model_accepts_loss_kwargs` to True"),
            (replace(TRAINER, divides=True, counts_items=False), ONCE, "multiply each micro-batch's loss by 4"),
            # a framework that does not divide
            (TRAINER, TWICE, "multiply each micro-batch's loss by 4"),
            (replace(ACCELERATE, steps=1), TWICE, "multiply each micro-batch's loss by 4"),
            (None, TWICE, "multiply each micro-batch's loss by 4"),
        ],
    )
    def test_a_division_too_many(self, framework: FrameworkLoop | None, scales: Any, words: str) -> None:
        quarter = fit(0.25, right=(4.0,) * 4)
        (found,) = findings_for(self.made_by(framework, fit=quarter, scales=scales))
        assert found.code == "GAV201" and found.remedy is not None and words in found.remedy

    @pytest.mark.parametrize(
        ("framework", "words"),
        [
            (TRAINER, "divide by `num_items_in_batch`, which the Trainer passes to `compute_loss`"),
            (replace(TRAINER, counts_items=None), "use transformers 4.46 or newer"),
            (replace(TRAINER, counts_items=False), "multiply"),
            (ACCELERATE, "multiply"),
        ],
    )
    @pytest.mark.parametrize("equal", [True, False])
    def test_a_loss_that_ignores_the_count(self, framework: FrameworkLoop, words: str, equal: bool) -> None:
        counts = (2, 2, 2, 2) if equal else (1, 2, 3, 4)
        right = tuple(count / sum(counts) for count in counts)
        differs = fit(4.0, 1e-7 if equal else 0.3, right=right)
        *scales, found = findings_for(self.made_by(framework, fit=differs, valid_targets=counts, scales=ONCE))
        assert found.code == ("GAV201" if equal else "GAV202") and found.remedy is not None
        # the Trainer's number of targets repairs the factor as well as the shares, and both are named
        assert [scale.code for scale in scales] == ["GAV201"] * (not equal)
        assert all(scale.remedy is not None and words in scale.remedy for scale in scales)
        assert words in found.remedy and ("multiply" in found.remedy) == (words == "multiply")

    @pytest.mark.parametrize(
        ("framework", "fields", "words", "said"),
        [
            (replace(TRAINER, divides=True), {"valid_targets": (1, 2, 3, 4)}, "`model_accepts_loss_kwargs` to T", True),
            (TRAINER, {"sizes": (1, 2, 3, 4)}, "num_items_in_batch", False),
        ],
        ids=["divides still", "weights of rows"],
    )
    def test_unequal_weights_under_a_trainer(
        self, framework: FrameworkLoop, fields: dict[str, Any], words: str, said: bool
    ) -> None:
        (found,) = findings_for(self.made_by(framework, fit=fit(1.0, 0.3, right=UNEQUAL), **fields))
        assert found.remedy is not None and (words in found.remedy) is said
