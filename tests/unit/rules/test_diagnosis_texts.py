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
from gaverify.records.findings import Location
from gaverify.records.outcomes import Method, PrecisionLoss
from gaverify.rules import findings_for
from gaverify.rules.rule import write_exactly
from gaverify.thresholds import FIT_EXACT


def test_batch_statistics_prints_the_remedies_that_were_run() -> None:
    group, failed = (
        ControlRun("GroupNorm(2, 8)", 2e-16, True, kind=ControlKind.REPLACED),
        ControlRun("LayerNorm", 0.3, False, kind=ControlKind.REPLACED),
    )
    finding = only(divergent(causes=(norm(remedies=(group, failed)),)))
    assert finding.summary == "layer `1` (BatchNorm1d) normalises with the statistics of the micro-batch"
    assert finding.location == Location("1", "BatchNorm1d")
    assert finding.remedy.startswith(
        "replace it by GroupNorm(2, 8), which changes the model (gaverify ran it in its place"
    )
    assert "; or keep it in evaluation mode (`.eval()`" in finding.remedy
    assert "LayerNorm" not in finding.remedy
    assert finding.proven
    assert evidence(finding, "control") == "with `1` in evaluation mode in both runs the difference is 1e-16: proven"


@pytest.mark.parametrize(
    ("control", "cleared", "proven"),
    [(HELPED, False, True), (HALVED, True, True), (HALVED, False, False), (None, True, False)],
)
def test_proven_only_where_a_control_run_shows_it(control: ControlRun | None, cleared: bool, proven: bool) -> None:
    for found in (norm(control=control), cause(control=control), coupled(control=control)):
        assert findings_for(divergent(causes=(found,), cleared=cleared))[0].proven is proven


def test_one_of_several_causes_says_how_much_it_explains() -> None:
    alone = findings_for(divergent(causes=(norm(control=HALVED),)))[0]
    assert evidence(alone, "control").endswith("this explains 75%, and another cause remains")
    beside = findings_for(divergent(causes=(norm(control=HALVED),), cleared=True))[0]
    assert evidence(beside, "control").endswith("the other causes listed explain the rest")


def test_a_coupled_loss_points_to_its_line() -> None:
    finding = only(divergent(causes=(coupled(),)))
    assert finding.summary == "the loss compares the samples of a batch with each other"
    assert (finding.location.file, finding.location.line) == ("train.py", 12)
    assert "`logits = a @ b.T`" in evidence(finding, "measured")
    assert (
        evidence(finding, "fit")
        == "no micro-batch weights reproduce the gradient: the best leave a difference of 4.0e-01"
    )
    assert "gaverify.remedies.CachedGradients" in finding.remedy


def test_the_cached_gradient_is_promised_only_where_it_was_run() -> None:
    """They are tried before anything is held: what was held instead is no proof of them."""
    held = ControlRun("the result of `mm` kept constant", 1e-16, True)
    failed = ControlRun("cached gradients", 0.2, False, kind=ControlKind.CACHED_GRADIENTS)
    for control in (held, failed):
        remedy = only(divergent(causes=(coupled(control=control),))).remedy
        assert remedy == "compute the loss once over the outputs of all micro-batches"


@pytest.mark.parametrize(("left", "told"), [(1e-16, True), (0.17, False)])
def test_held_statistics_are_a_repair_only_where_their_gradient_came_out(left: float, told: bool) -> None:
    """Dice, VICReg: the control holds the statistics in both runs; as a repair they lose the gradient through them."""
    held = ControlRun("the reduction over the batch kept constant", 1e-16, True)
    tried = ControlRun("held", left, left < 1e-6, kind=ControlKind.FULL_BATCH_VALUE)
    for make in (coupled, cause):
        finding = only(divergent(causes=(make(control=held, remedies=(tried,)),)))
        assert ("use this constant in every micro-batch; gaverify ran it: equivalent" in finding.remedy) is told


def test_partners_are_paired_before_the_window_is_cut() -> None:
    """Operations that only move rows: a permutation, a flip. One that computes is no pairing."""
    held = ControlRun("the result of `flip` kept constant", 1e-16, True)
    for name, told in (("flip", True), ("index", True), ("mm", False)):
        finding = only(divergent(causes=(cause(Operation(name, "0"), control=held),)))
        assert ("mix before the batch is split" in finding.remedy) is told


def test_a_choice_of_rows_is_no_pairing() -> None:
    """Experts with a capacity take the first tokens that are sent to them: nobody is anybody's partner."""
    held = ControlRun("the output of `0` kept constant", 1e-16, True)
    finding = only(divergent(causes=(cause(Operation("index", "0"), control=held, kind="control-flow"),)))
    assert "pair the samples" not in finding.remedy and "one sample at a time" in finding.remedy


@pytest.mark.parametrize(
    ("control", "text"),
    [
        (HALVED, "another cause remains"),
        (ControlRun("held", 0.1, False), "the control is not exact, because it fixes values"),
        (
            ControlRun("cached", 0.1, False, kind=ControlKind.CACHED_GRADIENTS),
            "the control is not exact, because modules that the loss itself",
        ),
    ],
)
def test_another_cause_is_left_only_where_a_control_could_remove_it(control: ControlRun, text: str) -> None:
    assert text in evidence(findings_for(divergent(causes=(coupled(control=control),)))[0], "control")
    several = findings_for(divergent(causes=(norm(), coupled(control=control))))
    assert "another cause remains" in "".join(evidence(finding, "control") for finding in several)


def test_unexplained_says_each_reason_once_and_advises_by_what_is_known() -> None:
    failed = {"state": "out of memory", "backward": "out of memory"}
    finding = only(divergent(failures=failed, ruled_out=("`mm` at a.py:1", "`mm` at a.py:1")))
    text = evidence(finding, "ruled out")
    assert text.count("out of memory") == 1 and "state, backward could not run" in text
    assert text.count("`mm` at a.py:1") == 1
    assert "a smaller batch" in finding.remedy
    in_loss, in_model = (Operation("mul", module, file="model.py", line=3) for module in (None, "layers.0"))
    assert only(divergent(ruled_out=(in_loss,))).remedy.startswith("bisect")
    remedy = only(divergent(ruled_out=(in_model,))).remedy
    assert remedy.startswith("look at what differs first in the model, `mul` at model.py:3 in `layers.0`; ")
    assert only(divergent()).remedy.startswith("bisect")


def test_the_reduction_is_the_culprit_of_what_reads_it() -> None:
    mean = Operation("mean", "2", "Centred", file="model.py", line=7, source="x - x.mean(0)")
    finding = only(divergent(causes=(cause(source=mean),)))
    assert finding.location == mean.location
    assert "`mean` at model.py:7 reduces over the batch, and `native_batch_norm` applies the result" in evidence(
        finding, "measured"
    )


def test_backward_names_parameters_hooks_and_module() -> None:
    finding = only(divergent(forwards_agree=True, loss_gap=1e-16, hooked=("0.weight",)))
    assert finding.summary == (
        "the backward of `0.weight`, `0.bias` depends on the batch, although all forward values agree"
    )
    assert finding.location == Location("0") and not finding.proven
    assert "hooks are registered on `0.weight`" in evidence(finding, "measured")
    known = only(divergent(forwards_agree=True, loss_gap=1e-16, backward_culprit=LINE))
    assert known.location == LINE.location


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


def test_wrong_loss_scale_is_not_proven_by_a_control_that_leaves_something() -> None:
    finding = findings_for(divergent(weights=(1.0,) * 4, **fitted(*QUARTERS, left=0.1)))[0]
    assert (finding.code, finding.proven) == ("GAV201", False)
    assert "a difference of 1e-01 is left" in evidence(finding, "control")


def test_mean_of_means_says_what_the_weights_are() -> None:
    lengths = (8.0, 4.0, 11.0, 6.0)
    shares = tuple(length / 29 for length in lengths)
    tokens = only(divergent(valid_targets=lengths, **fitted(*shares)))
    assert evidence(tokens, "weights").endswith("of valid targets: 8 of 29, 4 of 29, 11 of 29, 6 of 29")
    assert "--weighting tokens" in tokens.remedy and tokens.remedy.endswith("gaverify ran it: equivalent")
    samples = only(divergent(sizes=(6, 6, 2, 2), **fitted(6 / 16, 6 / 16, 2 / 16, 2 / 16)))
    assert "--weighting samples" in samples.remedy
    unknown = only(divergent(valid_targets=(1.0, 2.0, 2.0, 3.0), **fitted(0.1, 0.2, 0.3, 0.5)))
    assert unknown.remedy == "weight each micro-batch by its share of what the full batch's mean averages over"
    assert "0.1, 0.2, 0.3, 0.5" in evidence(unknown, "weights"), "numbers of this batch are a measurement, no repair"


def test_mean_of_means_admits_what_it_cannot_tell() -> None:
    finding = only(divergent(**fitted(0.1, 0.2, 0.3, 0.5, determined=False)))
    assert "other weights fit as well" in evidence(finding, "weights")
    unproven = findings_for(divergent(**fitted(0.1, 0.2, 0.3, 0.5, left=0.1)))[0]
    assert not unproven.proven and "gaverify ran it" not in unproven.remedy


def test_weights_whose_control_failed_are_no_repair() -> None:
    """A loss that clears gradients: weights fit what was seen, and running with them leaves the difference."""
    for weights, used in (((0.1, 0.2, 0.3, 0.5), QUARTERS), (QUARTERS, (1.0,) * 4)):
        finding = findings_for(divergent(weights=used, **fitted(*weights, left=0.9)))[0]
        assert not finding.proven and "multiply" not in finding.remedy and "do not repair it" in finding.remedy
        beside = findings_for(divergent(weights=used, cleared=True, **fitted(*weights, left=0.9)))[0]
        assert "do not repair it" not in beside.remedy, (
            "together with the causes named beside it they were run, and repair it"
        )


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


def test_empty_micro_batches_are_counted_from_one() -> None:
    empty = {"valid_targets": (8.0, 0.0, 8.0, 8.0), **fitted(1 / 3, 0.0, 1 / 3, 1 / 3)}
    finding = only(divergent(micro_losses=(1.0, NAN, 1.0, 1.0), rows=(BROKEN,), **empty | {"fit": None}))
    assert finding.summary == "micro-batch 2 of 4 has no valid target: its mean loss is 0/0"
    assert "valid targets per micro-batch: 8, 0, 8, 8" in evidence(finding, "measured")
    assert only(divergent(**empty)).summary.endswith("it gets a share of the mean but adds nothing")


def test_unalignable_randomness_lists_its_reasons() -> None:
    finding = only(divergent(draws_unaligned={"randperm": "no rows"}, foreign_draws_differ=True))
    assert evidence(finding, "measured") == (
        "`randperm`: no rows; `Python or NumPy generator`: the number of draws depends on the batch"
    )
    assert not finding.proven
    constant = ControlRun("all draws constant", 1e-16, True)
    assert only(divergent(draws_unaligned={"randperm": "no rows"}, draw_control=constant)).proven


def test_state_names_what_changed_and_who_wrote_it() -> None:
    writer = Operation("lerp_", "1", "Centred", file="model.py", line=9)
    finding = only(divergent(state=changed("buffer", writer=writer, restored=True)))
    assert finding.summary == "the forward changes buffer `1.buffer`, which the next micro-batch reads"
    assert finding.location == writer.location
    assert "`1.buffer` is written by `lerp_` at model.py:9" in evidence(finding, "measured")
    assert finding.remedy.startswith("copy the state before the first micro-batch of an update")
    assert finding.proven
    held = only(divergent(state=changed("buffer")))
    assert held.location is None and held.remedy.startswith("update the state once per optimizer step")


def test_hidden_state_out_of_reach_is_suspected() -> None:
    finding = only(divergent(repeatability=Repeatability(0.2, 0.3)))
    assert not finding.proven and "the loss differs by 2.0e-01" in evidence(finding, "measured")


def test_precision_says_how_many_bits_and_what_float32_would_give() -> None:
    finding = only(record(precision=PrecisionLoss("bfloat16", 3e-3, 1.2e-2, in_float32=3.1e-3)))
    assert finding.summary == "accumulating in bfloat16 loses 2.0 bits of the gradient"
    assert finding.remedy.endswith("gaverify ran it: the error is 3.1e-03 instead of 1.2e-02")
    untried = only(record(precision=PrecisionLoss("bfloat16", 3e-3, 1.2e-2)))
    assert untried.remedy == "accumulate the gradients in float32"
    for no_better in (2e-2, 1.1e-2):
        assert not findings_for(record(precision=PrecisionLoss("bfloat16", 3e-3, 1.2e-2, in_float32=no_better)))


def test_unexplained_prints_what_was_ruled_out() -> None:
    measured = divergent(
        forwards_agree=True,
        loss_gap=1e-3,
        ruled_out=("`mm` at train.py:12",),
        failures={"state": "no float64 for `grouped_mm`"},
    )
    text = evidence(only(measured), "ruled out")
    for part in (
        "the best ones leave a difference of 4.0e-01",
        "running the same twice gives the same result",
        "nothing that the forward changes is read again",
        "all forward values agree",
        "`mm` at train.py:12: without it",
        "state could not run: no",
    ):
        assert part in text
    assert evidence(only(divergent(fit=None, repeatability=None, state=None)), "ruled out") == "nothing"


@pytest.mark.parametrize(("noise", "word"), [(5.0, "negligible"), (0.8, "medium"), (0.1, "high")])
def test_harm_is_told_once_against_the_sampling_noise(noise: float, word: str) -> None:
    measured = divergent(causes=(norm(), coupled()), fit=WeightFit(QUARTERS, 0.4, True, noise=noise))
    first, second = findings_for(measured)
    assert evidence(first, "harm").startswith(f"{word}: the difference is ")
    assert first.evidence[-1].values["ratio"] == pytest.approx(measured.compared.total / noise)
    assert evidence(second, "harm") == ""


@pytest.mark.parametrize("samples", [4, None])
def test_what_a_part_of_the_batch_tells_says_so(samples: int | None) -> None:
    fit = WeightFit((), 0.4, noise=0.5, samples=samples)
    found = only(divergent(fit=fit, causes=(coupled(),)))
    assert ("(estimated from 4 samples of this batch)" in evidence(found, "harm")) is (samples is not None)
    assert ("reproduce the gradient of the first 4 samples" in evidence(found, "fit")) is (samples is not None)


def test_harm_is_not_told_where_it_is_unknown() -> None:
    unknown = divergent(causes=(norm(),), fit=WeightFit(QUARTERS, 0.4, True))
    assert evidence(only(unknown), "harm") == ""
    assert evidence(only(record(drift={"1.mean": 0.1})), "harm") == ""


def test_harm_is_told_of_faults_and_of_what_is_unexplained_only() -> None:
    assert evidence(only(divergent()), "harm") != ""
    noted = divergent(diagnosed=False, drift={"1.mean": 0.1})
    assert evidence(only(noted), "harm") == "", "a note explains no divergence"


@pytest.mark.parametrize(("residual", "told"), [(0.4, True), (1e-12, False)])
def test_a_coupled_loss_tells_what_weights_leave_over(residual: float, told: bool) -> None:
    finding = only(divergent(causes=(coupled(),), fit=WeightFit(QUARTERS, residual, True)))
    assert bool(evidence(finding, "fit")) is told
    assert evidence(only(divergent(causes=(coupled(),), fit=None)), "fit") == ""


def test_one_factor_by_the_norms_is_held_against_the_precision_that_decided() -> None:
    nearly = (row(accumulated=8.0, difference=math.sqrt(36 + 1e-8)),)  # 1e-4 of the direction is another
    assert judged(record(rows=nearly, method=Method.NOISE_FLOOR)) == [("GAV201", "fault")]
    assert judged(record(rows=nearly, method=Method.FLOAT64_CONTROL)) == []
    assert judged(record(rows=(row(accumulated=8.0, difference=6.0), BROKEN))) == [("GAV503", "fault")]


@pytest.mark.parametrize("place", ["buffer", "attribute"])
def test_state_is_proven_by_its_control_only(place: str) -> None:
    assert only(divergent(state=changed(place))).proven
    change = (StateChange(f"1.{place}", place),)  # type: ignore[arg-type]
    for control in (None, HALVED):
        finding = only(divergent(state=State(change, control, change)))
        assert not finding.proven
        assert bool(evidence(finding, "control")) is (control is not None)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (divergent(causes=(cause(),)), "`1` (BatchNorm1d) mixes the samples of a batch"),
        (divergent(causes=(cause(kind="control-flow"),)), "`1` (BatchNorm1d) takes a branch that depends on the batch"),
        (
            divergent(**fitted(0.1, 0.2, 0.3, 0.5)),
            "micro-batches that count differently in the full batch's mean get the same loss weight",
        ),
        (
            divergent(weighting="samples", **fitted(0.1, 0.2, 0.3, 0.5)),
            "micro-batches get loss weights that are not their shares of the full batch's mean",
        ),
        (record(drift={"a": 0.1}), "`a` is updated 4 times per optimizer step and ends up different"),
        (
            record(drift=dict.fromkeys("abcd", 0.1)),
            "`a`, `b`, `c` and 1 more are updated 4 times per optimizer step and end up different",
        ),
        (divergent(rows=(MISSING,), fit=None), "`0.bias` has no gradient (None) in the accumulated run only"),
        (
            divergent(rows=(MISSING,) * 3, fit=None),
            "`0.bias` and 2 more have no gradient (None) in the accumulated run only",
        ),
        (divergent(rows=(BROKEN,), fit=None), "the gradient of `0.bias` is not finite in the accumulated run only"),
        (
            divergent(rows=(BROKEN,) * 3, fit=None),
            "the gradient of `0.bias` and 2 more parameters is not finite in the accumulated run only",
        ),
    ],
)
def test_summaries(measured: Comparison, words: str) -> None:
    assert only(measured).summary == words


def test_how_many_samples_differ_is_told_where_rows_were_compared() -> None:
    assert "for 16 of 16 samples" in evidence(only(divergent(causes=(cause(),))), "measured")
    assert "samples" not in evidence(only(divergent(causes=(coupled("non-additive"),))), "measured")


@pytest.mark.parametrize(
    ("following", "text"),
    [
        (None, "put the copy back before each other one (gaverify ran it: equivalent in one update); or"),
        (NextUpdate(1e-6, 1e-7, 1e-7), "put the copy back before each other one (gaverify ran it: equivalent); or"),
        (
            NextUpdate(1e-6, 0.1, 1e-7, 1e-7),
            "without gradients (gaverify ran it: equivalent in two updates; without that pass",
        ),
        (
            NextUpdate(1e-6, 0.1, 1e-7, 0.1),
            "(gaverify ran it: it repairs one update, and leaves a ",
        ),
        (NextUpdate(1e-6, 0.1, 0.1), "(gaverify ran it: it repairs one update, and leaves a "),
    ],
)
def test_a_repair_of_state_says_for_which_updates_it_was_tested(following: NextUpdate | None, text: str) -> None:
    restored = replace(changed("buffer", restored=True), next_update=following)
    assert text in only(divergent(state=restored)).remedy


@pytest.mark.parametrize("cleared", [True, False])
def test_an_order_of_repairs_is_told_only_where_all_of_them_together_leave_nothing(cleared: bool) -> None:
    found = findings_for(divergent(causes=(norm(), coupled()), cleared=cleared))
    assert [str(finding.remedy).startswith("fix ") for finding in found] == [cleared, cleared]
