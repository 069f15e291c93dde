"""What the rules say: locations, evidence, remedies, and what counts as proven; on records written by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from measured import (
    BROKEN,
    HALVED,
    HELPED,
    LINE,
    MISSING,
    NAN,
    QUARTERS,
    cause,
    changed,
    coupled,
    divergent,
    evidence,
    fitted,
    judged,
    norm,
    only,
    record,
    row,
)

from gaverify.records.comparison import Comparison, NextUpdate, Repeatability, State, StateChange
from gaverify.records.experiment import ControlKind, ControlRun, Operation, WeightFit
from gaverify.records.findings import Finding, Location
from gaverify.records.outcomes import Method, PrecisionLoss
from gaverify.rules import findings_for
from gaverify.rules.rule import write_exactly
from gaverify.thresholds import FIT_EXACT


def part_of(finding: Finding, part: str) -> str:
    """The summary, the remedy, or what the evidence of a label states."""
    return str(getattr(finding, part)) if part in ("summary", "remedy") else evidence(finding, part)


def held(what: str) -> ControlRun:
    return ControlRun(f"the result of `{what}` kept constant", 1e-16, True)


def moved_by(name: str, **changes: str) -> Comparison:
    return divergent(causes=(cause(Operation(name, "0"), control=held(name), **changes),))


def repaired(restored_in: NextUpdate | None) -> Comparison:
    return divergent(state=replace(changed("buffer", restored=True), next_update=restored_in))


def precision(accumulated: float, in_float32: float | None = None) -> Comparison:
    return record(precision=PrecisionLoss("bfloat16", 3e-3, accumulated, in_float32=in_float32))


GROUP = ControlRun("GroupNorm(2, 8)", 2e-16, True, kind=ControlKind.REPLACED)
FAILED = ControlRun("LayerNorm", 0.3, False, kind=ControlKind.REPLACED)
CACHED_IN_VAIN = ControlRun("cached gradients", 0.2, False, kind=ControlKind.CACHED_GRADIENTS)
LENGTHS = (8.0, 4.0, 11.0, 6.0)
EMPTY = {"valid_targets": (8.0, 0.0, 8.0, 8.0), **fitted(1 / 3, 0.0, 1 / 3, 1 / 3)}
WITHOUT_TARGETS = {**EMPTY, "fit": None, "micro_losses": (1.0, NAN, 1.0, 1.0), "rows": (BROKEN,)}
MEAN = Operation("mean", "2", "Centred", file="model.py", line=7, source="x - x.mean(0)")
WRITER = Operation("lerp_", "1", "Centred", file="model.py", line=9)
IN_LOSS, IN_MODEL = (Operation("mul", module, file="model.py", line=3) for module in (None, "layers.0"))
REPLACED = divergent(causes=(norm(remedies=(GROUP, FAILED)),))
TOKENS = divergent(valid_targets=LENGTHS, **fitted(*(length / 29 for length in LENGTHS)))
UNKNOWN = divergent(valid_targets=(1.0, 2.0, 2.0, 3.0), **fitted(0.1, 0.2, 0.3, 0.5))
BACKWARD = divergent(forwards_agree=True, loss_gap=1e-16, hooked=("0.weight",))
SCALED_DOUBTFULLY = divergent(weights=(1.0,) * 4, **fitted(*QUARTERS, left=0.1))
UNALIGNED = {"draws_unaligned": {"randperm": "no rows"}, "foreign_draws_differ": True}
RULED_OUT = divergent(forwards_agree=True, loss_gap=1e-3, ruled_out=("`mm` at train.py:12",), failures={"state": "no"})
NOT_RUN = divergent(
    failures={"state": "out of memory", "backward": "out of memory"}, ruled_out=("`mm` at a.py:1", "`mm` at a.py:1")
)
SAID: list[tuple[Comparison, str, str]] = [
    (REPLACED, "remedy", "replace it by GroupNorm(2, 8), which changes the model (gaverify ran it in its place"),
    (REPLACED, "control", "with `1` in evaluation mode in both runs the difference is 1e-16: proven"),
    (divergent(causes=(norm(control=HALVED),)), "control", "this explains 75%, and another cause remains"),
    (divergent(causes=(norm(control=HALVED),), cleared=True), "control", "the other causes listed explain the rest"),
    (divergent(causes=(coupled(),)), "measured", "`logits = a @ b.T`"),
    (divergent(causes=(coupled(),)), "fit", "difference of 4.0e-01"),
    (divergent(causes=(coupled(),)), "remedy", "gaverify.remedies.CachedGradients"),
    (moved_by("flip"), "remedy", "mix before the batch is split"),
    (moved_by("index"), "remedy", "mix before the batch is split"),
    # experts with a capacity take the first tokens that are sent to them: nobody is anybody's partner
    (moved_by("index", kind="control-flow"), "remedy", "one sample at a time"),
    (divergent(causes=(coupled(control=HALVED),)), "control", "another cause remains"),
    (divergent(causes=(coupled(control=ControlRun("held", 0.1, False)),)), "control", "not exact, because it fixes"),
    (divergent(causes=(coupled(control=CACHED_IN_VAIN),)), "control", "because modules that the loss itself"),
    (NOT_RUN, "ruled out", "state, backward could not run"),
    (NOT_RUN, "remedy", "a smaller batch"),
    (divergent(ruled_out=(IN_LOSS,)), "remedy", "bisect"),
    (divergent(ruled_out=(IN_MODEL,)), "remedy", "look at what differs first in the model, `mul` at model.py:3 in"),
    (divergent(), "remedy", "bisect"),
    (RULED_OUT, "ruled out", "the best ones leave a difference of 4.0e-01"),
    (RULED_OUT, "ruled out", "running the same twice gives the same result"),
    (RULED_OUT, "ruled out", "nothing that the forward changes is read again"),
    (RULED_OUT, "ruled out", "all forward values agree"),
    (RULED_OUT, "ruled out", "`mm` at train.py:12: without it"),
    (RULED_OUT, "ruled out", "state could not run: no"),
    (divergent(fit=None, repeatability=None, state=None), "ruled out", "nothing"),
    (divergent(causes=(cause(source=MEAN),)), "measured", "`mean` at model.py:7 reduces over the batch, and `native"),
    (divergent(causes=(cause(),)), "measured", "for 16 of 16 samples"),
    (BACKWARD, "summary", "the backward of `0.weight`, `0.bias` depends on the batch, although all"),
    (BACKWARD, "measured", "hooks are registered on `0.weight`"),
    (SCALED_DOUBTFULLY, "control", "a difference of 1e-01 is left"),
    (TOKENS, "weights", "of valid targets: 8 of 29, 4 of 29, 11 of 29, 6 of 29"),
    (TOKENS, "remedy", "--weighting tokens"),
    (divergent(sizes=(6, 6, 2, 2), **fitted(3 / 8, 3 / 8, 1 / 8, 1 / 8)), "remedy", "--weighting samples"),
    (UNKNOWN, "weights", "0.1, 0.2, 0.3, 0.5"),
    (divergent(**fitted(0.1, 0.2, 0.3, 0.5, determined=False)), "weights", "other weights fit as well"),
    (divergent(**WITHOUT_TARGETS), "summary", "micro-batch 2 of 4 has no valid target: its mean loss is 0/0"),
    (divergent(**EMPTY), "summary", "it gets a share of the mean but adds nothing"),
    (divergent(**EMPTY), "measured", "valid targets per micro-batch: 8, 0, 8, 8"),
    (divergent(**UNALIGNED), "measured", "`randperm`: no rows; `Python or NumPy generator`: the number"),
    (divergent(state=changed("buffer")), "summary", "the forward changes buffer `1.buffer`, which the"),
    (divergent(state=changed("buffer", writer=WRITER)), "measured", "`1.buffer` is written by `lerp_` at model.py:9"),
    (divergent(state=changed("buffer", restored=True)), "remedy", "copy the state before the first micro-batch of an"),
    (divergent(state=changed("buffer")), "remedy", "update the state once per optimizer step"),
    (divergent(repeatability=Repeatability(0.2, 0.3)), "measured", "the loss differs by 2.0e-01"),
    (precision(1.2e-2, 3.1e-3), "summary", "accumulating in bfloat16 loses 2.0 bits of the gradient"),
    (precision(1.2e-2, 3.1e-3), "remedy", "gaverify ran it: the error is 3.1e-03 instead of 1.2e-02"),
    (precision(1.2e-2), "remedy", "accumulate the gradients in float32"),
    (divergent(causes=(cause(),)), "summary", "`1` (BatchNorm1d) mixes the samples of a batch"),
    (divergent(causes=(cause(kind="control-flow"),)), "summary", "`1` (BatchNorm1d) takes a branch that depends on"),
    (divergent(**fitted(0.1, 0.2, 0.3, 0.5)), "summary", "micro-batches that count differently in the"),
    (divergent(weighting="samples", **fitted(0.1, 0.2, 0.3, 0.5)), "summary", "micro-batches get loss weights"),
    (record(drift={"a": 0.1}), "summary", "`a` is updated 4 times per optimizer step and ends up different"),
    (record(drift=dict.fromkeys("abcd", 0.1)), "summary", "`a`, `b`, `c` and 1 more are updated 4 times per optimizer"),
    (divergent(rows=(MISSING,), fit=None), "summary", "`0.bias` has no gradient (None) in the accumulated run only"),
    (divergent(rows=(MISSING,) * 3, fit=None), "summary", "`0.bias` and 2 more have no gradient (None) in the"),
    (divergent(rows=(BROKEN,), fit=None), "summary", "the gradient of `0.bias` is not finite in the accumulated run"),
    (divergent(rows=(BROKEN,) * 3, fit=None), "summary", "the gradient of `0.bias` and 2 more parameters is"),
    (repaired(None), "remedy", "before each other one (gaverify ran it: equivalent in one update); or"),
    (repaired(NextUpdate(1e-6, 1e-7, 1e-7)), "remedy", "before each other one (gaverify ran it: equivalent); or"),
    (repaired(NextUpdate(1e-6, 0.1, 1e-7, 1e-7)), "remedy", "ran it: equivalent in two updates; without that"),
    (repaired(NextUpdate(1e-6, 0.1, 1e-7, 0.1)), "remedy", "(gaverify ran it: it repairs one update, and leaves a "),
    (repaired(NextUpdate(1e-6, 0.1, 0.1)), "remedy", "(gaverify ran it: it repairs one update, and leaves a "),
]


@pytest.mark.parametrize(("measured", "part", "words"), SAID)
def test_a_finding_says(measured: Comparison, part: str, words: str) -> None:
    assert words in part_of(findings_for(measured)[0], part)


@pytest.mark.parametrize(
    ("measured", "part", "words"),
    [
        (REPLACED, "remedy", "LayerNorm"),
        (moved_by("mm"), "remedy", "mix before the batch is split"),
        (moved_by("index", kind="control-flow"), "remedy", "pair the samples"),
        (divergent(**fitted(0.1, 0.2, 0.3, 0.5, left=0.1)), "remedy", "gaverify ran it"),
        (divergent(causes=(coupled("non-additive"),)), "measured", "samples"),
        # they are tried before anything is held: what was held instead is no proof of cached gradients
        (divergent(causes=(coupled(control=held("mm")),)), "remedy", "CachedGradients"),
        (divergent(causes=(coupled(control=CACHED_IN_VAIN),)), "remedy", "CachedGradients"),
    ],
)
def test_a_finding_does_not_say(measured: Comparison, part: str, words: str) -> None:
    assert words not in part_of(only(measured), part)


@pytest.mark.parametrize(
    ("measured", "location"),
    [
        (REPLACED, Location("1", "BatchNorm1d")),
        (divergent(causes=(coupled(),)), LINE.location),
        (divergent(causes=(cause(source=MEAN),)), MEAN.location),
        (BACKWARD, Location("0")),
        (divergent(forwards_agree=True, loss_gap=1e-16, backward_culprit=LINE), LINE.location),
        (divergent(state=changed("buffer", writer=WRITER)), WRITER.location),
        (divergent(state=changed("buffer")), None),
    ],
)
def test_a_finding_lies_where_its_cause_does(measured: Comparison, location: Location | None) -> None:
    assert only(measured).location == location


@pytest.mark.parametrize(
    ("measured", "is_proven"),
    [
        (BACKWARD, False),
        (SCALED_DOUBTFULLY, False),
        (divergent(**fitted(0.1, 0.2, 0.3, 0.5, left=0.1)), False),
        (divergent(**UNALIGNED), False),
        (divergent(**UNALIGNED, draw_control=ControlRun("all draws constant", 1e-16, True)), True),
        (divergent(repeatability=Repeatability(0.2, 0.3)), False),
        *((divergent(state=changed(place)), True) for place in ("buffer", "attribute")),
        *(
            (divergent(causes=(make(control=control),), cleared=cleared), is_proven)
            for make in (norm, cause, coupled)
            for control, cleared, is_proven in (
                (HELPED, False, True),
                (HALVED, True, True),
                (HALVED, False, False),
                (None, True, False),
            )
        ),
    ],
)
def test_proven_only_where_a_control_run_shows_it(measured: Comparison, is_proven: bool) -> None:
    assert findings_for(measured)[0].proven is is_proven


@pytest.mark.parametrize("place", ["buffer", "attribute"])
@pytest.mark.parametrize("control", [None, HALVED])
def test_state_is_proven_by_its_control_only(place: str, control: ControlRun | None) -> None:
    change = (StateChange(f"1.{place}", place),)  # type: ignore[arg-type]
    finding = only(divergent(state=State(change, control, change)))
    assert not finding.proven
    assert bool(evidence(finding, "control")) is (control is not None)


@pytest.mark.parametrize(("left", "told"), [(1e-16, True), (0.17, False)])
def test_held_statistics_are_a_repair_only_where_their_gradient_came_out(left: float, told: bool) -> None:
    """Dice, VICReg: the control holds the statistics in both runs; as a repair they lose the gradient through them."""
    tried = ControlRun("held", left, left < 1e-6, kind=ControlKind.FULL_BATCH_VALUE)
    for make in (coupled, cause):
        finding = only(divergent(causes=(make(control=held("mean"), remedies=(tried,)),)))
        assert ("use this constant in every micro-batch; gaverify ran it: equivalent" in finding.remedy) is told


@pytest.mark.parametrize("control", [HALVED, ControlRun("held", 0.1, False), CACHED_IN_VAIN])
def test_another_cause_remains_beside_one_that_is_proven(control: ControlRun) -> None:
    several = findings_for(divergent(causes=(norm(), coupled(control=control))))
    assert "another cause remains" in "".join(evidence(finding, "control") for finding in several)


def test_unexplained_says_each_reason_once() -> None:
    text = evidence(only(NOT_RUN), "ruled out")
    assert text.count("out of memory") == text.count("`mm` at a.py:1") == 1


@pytest.mark.parametrize(
    ("factor", "meaning"),
    [
        (4.0, "K): the loss is not divided by K"),
        (0.25, "1/K): the loss is divided by K once too often"),
        (16.0, "B)"),
        (1 / 16, "1/B)"),
        (0.8, None),
        (4.1, None),
    ],
)
def test_wrong_loss_scale_says_which_factor(factor: float, meaning: str | None) -> None:
    finding = only(divergent(weights=(0.25 * factor,) * 4, **fitted(*QUARTERS)))
    assert finding.summary.startswith(f"the accumulated gradient is {factor:.6g} times the full batch's")
    assert (f" (= {meaning}" in finding.summary) if meaning else finding.summary.endswith("full batch's")
    assert finding.evidence[0].values["factor"] == pytest.approx(factor)
    assert finding.remedy.endswith("(loss weights 0.25, 0.25, 0.25, 0.25); gaverify ran it: equivalent")
    assert finding.proven


@pytest.mark.parametrize(("weights", "used"), [((0.1, 0.2, 0.3, 0.5), QUARTERS), (QUARTERS, (1.0,) * 4)])
def test_weights_whose_control_failed_are_no_repair(weights: tuple[float, ...], used: tuple[float, ...]) -> None:
    """A loss that clears gradients: weights fit what was seen, and running with them leaves the difference."""
    finding = findings_for(divergent(weights=used, **fitted(*weights, left=0.9)))[0]
    assert not finding.proven and "multiply" not in finding.remedy and "do not repair it" in finding.remedy
    beside = findings_for(divergent(weights=used, cleared=True, **fitted(*weights, left=0.9)))[0]
    assert "do not repair it" not in beside.remedy, "together with the causes beside it they were run, and repair it"


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ((5 / 47, 12 / 47), "5/47, 12/47"),
        ((0.25, 0.1), "0.25, 0.1"),
        ((1 / 3 * (1 + 4e-16),), "1/3"),
        ((0.12345678901234567,), "0.123456789"),
        ((0.25, 5 / 47), "1/4, 5/47"),
        ((2.0, 4.0), "2, 4"),
    ],
)
def test_weights_to_copy_leave_nothing_over(weights: tuple[float, ...], text: str) -> None:
    """Six digits of 5/47 leave 1e-6, which gaverify itself calls divergent."""
    assert write_exactly(weights) == text
    for word, weight in zip(text.split(", "), weights, strict=True):
        assert float(Fraction(word)) == pytest.approx(weight, rel=FIT_EXACT)


def test_measured_digits_below_their_own_noise_are_not_printed() -> None:
    assert write_exactly([0.2501, 0.7496], 0.02) == "0.25, 0.75", "below float32 a weight is known to a percent"
    assert write_exactly([0.2500001], 1e-4) == "0.25" and write_exactly([1 / 3 + 4e-6], 1e-4) == "1/3"
    assert write_exactly([32 / 29, 1.1034547], 1e-6) == "1.103448, 1.103455", "some fraction is near any number"
    assert write_exactly([32 / 29, 5 / 29], 1e-7) == "32/29, 5/29"


@pytest.mark.parametrize("in_float32", [2e-2, 1.1e-2])
def test_precision_that_float32_does_not_give_back_is_not_lost(in_float32: float) -> None:
    assert not findings_for(precision(1.2e-2, in_float32))


@pytest.mark.parametrize(("noise", "word"), [(5.0, "negligible"), (0.8, "medium"), (0.1, "high")])
def test_harm_is_told_once_against_the_sampling_noise(noise: float, word: str) -> None:
    measured = divergent(causes=(norm(), coupled()), fit=WeightFit(QUARTERS, 0.4, True, noise=noise))
    first, second = findings_for(measured)
    assert evidence(first, "harm").startswith(f"{word}: the difference is ")
    assert first.evidence[-1].values["ratio"] == pytest.approx(measured.compared.total / noise)
    assert evidence(second, "harm") == ""


@pytest.mark.parametrize(
    ("measured", "is_told"),
    [
        (divergent(), True),
        (divergent(causes=(norm(),), fit=WeightFit(QUARTERS, 0.4, True)), False),
        (record(drift={"1.mean": 0.1}), False),
        (divergent(diagnosed=False, drift={"1.mean": 0.1}), False),
    ],
    ids=["unexplained", "noise that is not known", "a note", "a note beside a divergence"],
)
def test_harm_is_told_of_divergences_whose_noise_is_known(measured: Comparison, is_told: bool) -> None:
    assert bool(evidence(only(measured), "harm")) is is_told


@pytest.mark.parametrize("samples", [4, None])
def test_what_a_part_of_the_batch_tells_says_so(samples: int | None) -> None:
    fit = WeightFit((), 0.4, noise=0.5, samples=samples)
    found = only(divergent(fit=fit, causes=(coupled(),)))
    assert ("(estimated from 4 samples of this batch)" in evidence(found, "harm")) is (samples is not None)
    assert ("reproduce the gradient of the first 4 samples" in evidence(found, "fit")) is (samples is not None)


@pytest.mark.parametrize("fit", [WeightFit(QUARTERS, 1e-12, True), None])
def test_a_coupled_loss_tells_no_fit_that_leaves_nothing_over(fit: WeightFit | None) -> None:
    assert evidence(only(divergent(causes=(coupled(),), fit=fit)), "fit") == ""


def test_one_factor_by_the_norms_is_held_against_the_precision_that_decided() -> None:
    nearly = (row(accumulated=8.0, difference=math.sqrt(36 + 1e-8)),)  # 1e-4 of the direction is another
    assert judged(record(rows=nearly, method=Method.NOISE_FLOOR)) == [("GAV201", "fault")]
    assert judged(record(rows=nearly, method=Method.FLOAT64_CONTROL)) == []
    assert judged(record(rows=(row(accumulated=8.0, difference=6.0), BROKEN))) == [("GAV503", "fault")]


@pytest.mark.parametrize("cleared", [True, False])
def test_an_order_of_repairs_is_told_only_where_all_of_them_together_leave_nothing(cleared: bool) -> None:
    found = findings_for(divergent(causes=(norm(), coupled()), cleared=cleared))
    assert [str(finding.remedy).startswith("fix ") for finding in found] == [cleared, cleared]
