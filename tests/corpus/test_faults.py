"""Every fault of `FAULTS.md` that needs no training script: its code and only that one; its twin is quiet.

Several faults at once: each is named with what it explains. Faults of 6e-5, 1e-5 and 3e-6 are seen wherever rounding
lies in a model.
"""

from __future__ import annotations

import linecache
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import problems_backward
import problems_coupling
import problems_small
import problems_state
import problems_statistics
import problems_traps
import problems_unseen
import problems_weights
import pytest
import readme
import torch
import torch.nn.functional as F
from problems import Case, fault_codes, language_model, note_codes, story, token_batch, token_loss
from problems_small import FAMILIES, KINDS
from torch import nn

import gaverify
from gaverify import Outcome, ProblemError
from gaverify.records.findings import Evidence
from gaverify.report.verdict_page import sentence
from gaverify.verdict import control

_FAMILIES = (
    problems_backward,
    problems_statistics,
    problems_coupling,
    problems_weights,
    problems_state,
    problems_traps,
    problems_unseen,
)
FAULTS: tuple[Case, ...] = sum((family.FAULTS for family in _FAMILIES), ())
TWINS: tuple[Case, ...] = sum((family.TWINS for family in _FAMILIES), ())
COMBINED: tuple[Case, ...] = sum((getattr(family, "COMBINED", ()) for family in _FAMILIES), ())


# F01 is equivalent: the accumulation in bfloat16 loses bits, the recipe is right.
_SUSPECTED = (
    *("never-the-same", "hidden-schedule", "weights-from-schedule"),  # no control can be run
    # What is wrong lies in padding that the micro-batches lack: only a control that cuts the layers before it leaves
    # nothing, and it shows nothing about their gradients.
    "A08",
    "hook-before-mixing",  # the control that leaves nothing hides the hook, and the others leave what the hook makes
    *("own-cache", "own-cache-of-parts"),  # the loss has no graph to the model, so that nothing of it can be cached
)
CASES = (*FAULTS, *TWINS, problems_state.LOW_PRECISION)


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.outcome}-{case.id}") for case in CASES])
def test_planted_fault_raises_its_code_and_no_other_and_its_twin_is_quiet(case: Case) -> None:
    verdict = case.check()
    proven = all(finding.proven for finding in verdict.findings if finding.severity == "fault")
    assert proven or case.id in _SUSPECTED, story(verdict)


# State that is restored in a pass, a function with a backward of its own, pinned gradients, a loss that differentiates,
# cleared gradients, and a twin.
_LIFTED = ("averages", "backward-norm", "class-wise", "slopes-in-the-loss", "D05", "cleared", "B14")


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{c.outcome}-{c.id}") for c in CASES if c.id in _LIFTED])
def test_weights_that_are_lifted_as_those_of_a_large_model_change_no_answer(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_LIFTED", 0)
    case.check()


@pytest.mark.parametrize("family", _FAMILIES, ids=lambda family: family.__name__)
def test_every_marker_is_that_of_a_fault(family: ModuleType) -> None:
    markers = re.findall(r"# planted (\S+)$", Path(family.__file__ or "").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(markers) <= {case.id for case in (*family.FAULTS, *getattr(family, "COMBINED", ()))}


def test_fault_table_is_what_is_found_now() -> None:
    shown = readme.FAULTS.read_text(encoding="utf-8").partition("<!-- faults -->\n")[2].partition("<!-- /faults -->")[0]
    assert readme.skeleton(readme.fault_table()) == readme.skeleton(shown)
    assert "FLAGGED" not in shown


def faults_in(verdict: gaverify.Verdict) -> list[gaverify.Finding]:
    """The findings that explain a divergence."""
    return [finding for finding in verdict.findings if finding.severity == "fault"]


def faults_of(id: str) -> list[gaverify.Finding]:
    """The findings that explain the divergence of a case."""
    return faults_in(next(case for case in (*FAULTS, *COMBINED) if case.id == id).verify())


def control_of(finding: gaverify.Finding) -> Evidence:
    """The first control of a finding."""
    return next(evidence for evidence in finding.evidence if evidence.label == "control")


@pytest.mark.parametrize(
    ("id", "named"),
    [
        ("past-beside-statistics", ["`past`"]),
        ("factor-of-class", ["`_Schedule.factor`"]),
        ("factor-in-slots", ["`factor`"]),
        ("buffers-of-one-name", ["buffer `seen`"]),
        ("variable-and-buffer", ["`loss.seen`"]),
        ("larger-of-two", ["`largest`, `smallest`"]),
        ("number-and-buffer", ["buffer `seen`", "`largest`"]),
    ],
)
def test_state_is_named_by_the_part_of_it_that_was_restored_alone(id: str, named: list[str]) -> None:
    for finding, name in zip(faults_of(id), named, strict=True):
        assert f"the forward changes {name}, which" in finding.summary
        statement = control_of(finding).statement
        assert name.removeprefix("buffer ") in statement and "proven" in statement


def test_a_second_cause_beside_state_shows_in_the_second_update() -> None:
    number, average = faults_of("own-number-and-average")
    assert (number.code, average.code) == ("GAV103", "GAV403") and number.proven and average.proven
    assert "in a second update, in both runs the difference is " in str(number.evidence)
    assert "(gaverify ran it: it repairs one update, and leaves a difference in the next one); or " in average.remedy


@pytest.mark.parametrize(
    ("id", "text"),
    [
        ("global-step", "back before each other one (gaverify ran it: equivalent); or "),
        ("D05", "(gaverify ran it: equivalent in two updates; without that pass the second one differs); or "),
        ("sum-by-samples", "--weighting none); gaverify ran it: equivalent"),
    ],
)
def test_a_repair_says_what_was_run_and_in_which_updates(id: str, text: str) -> None:
    finding = faults_of(id)[0]
    assert finding.proven and text in finding.remedy


@pytest.mark.parametrize(("id", "least"), [("branch-on-size", 4), ("mask-of-one-text", 2)])
def test_branch_on_a_shape_is_proven_by_larger_micro_batches_and_can_be_avoided_by_them(id: str, least: int) -> None:
    (finding,) = faults_of(id)
    larger = f"micro-batches of at least {least} samples"
    assert control_of(finding).statement.startswith(f"with {larger} the difference is ")
    assert finding.remedy.endswith(f"or use {larger}; gaverify ran it: equivalent")
    assert "not all forwards run `mul` at" in finding.evidence[0].statement
    assert "samples interact through choices" not in str(finding.evidence)


@pytest.mark.parametrize(
    ("ids", "agree"),
    [
        # rows of unequal length, memory that nobody has written, numbers that cancel: no operation is suspected
        (["hook-before-mask", "hook-before-junk", "hook-beside-numbers"], "all forward values agree"),
        # the search goes on behind an operation whose control shows nothing
        (["hook-before-fill", "hook-beside-fill", "function-beside-fill"], "the losses agree"),
    ],
)
def test_no_operation_is_blamed_whose_difference_reaches_nothing(ids: list[str], agree: str) -> None:
    for id in ids:
        (finding,) = faults_of(id)
        assert finding.summary.endswith(f"although {agree}"), id


@pytest.mark.parametrize("id", ["A09-randperm", "A09-flip"])
def test_partners_and_their_targets_are_one_fault(id: str) -> None:
    (finding,) = faults_of(id)
    assert finding.code == "GAV103" and finding.proven
    assert finding.remedy.startswith("mix before the batch is split: ") and "fix 1 of" not in finding.remedy
    (control,) = [evidence for evidence in finding.evidence if evidence.label == "control"]
    assert "kept constant and with the loss computed once over the full batch" in control.statement


FACTORS = {"B02": 4.0, "B04": 1 / 2, "B05": 1 / 4, "B06": 4.0, "B09": 24 / 36, "B14": 1 / 4, "L19": 4.0}


@pytest.mark.parametrize(("id", "factor"), FACTORS.items())
def test_wrong_loss_scale_names_its_factor(id: str, factor: float) -> None:
    (finding,) = faults_of(id)
    assert finding.code == "GAV201" and finding.proven
    assert finding.evidence[0].values["factor"] == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize(
    ("id", "weights"),
    [
        ("B01", [11 / 24, 3 / 24, 7 / 24, 3 / 24]),
        ("B11", [16 * n / 43 / 4 for n in (17, 5, 9, 12)]),
        ("B13", [6 / 16, 6 / 16, 4 / 16]),
    ],
)
def test_mean_of_means_names_the_right_weights(id: str, weights: list[float]) -> None:
    (finding,) = faults_of(id)
    assert finding.code == "GAV202" and finding.proven
    fitted = next(evidence.values["weights"] for evidence in finding.evidence if "weights" in evidence.values)
    assert fitted == pytest.approx(weights, rel=1e-6)


@pytest.mark.parametrize("id", ["tokens-by-hand", "packed-dropout", "packed-by-hand", "few-numbers", "class-weights"])
def test_weights_that_hide_behind_draws_or_few_numbers_are_repaired(id: str) -> None:
    remedy = faults_of(id)[0].remedy
    assert remedy.endswith("gaverify ran it: equivalent") and ("--weighting" in remedy or "by-hand" in id), remedy


def test_a_micro_batch_of_weight_zero_and_class_weights_are_named_as_such() -> None:
    (zero,), (weighted,) = faults_of("zero-weight"), faults_of("class-weights")
    assert "micro-batch 4 has weight 0" in zero.evidence[0].statement
    assert "shares of valid targets: 1 of 8, 2 of 8, 1 of 8, 2 of 8, 2 of 8" in zero.evidence[1].statement
    assert weighted.summary == "micro-batches with different sums of class weights get the same loss weight"
    assert "shares of the sums of class weights" in weighted.evidence[1].statement
    assert "valid targets" not in f"{weighted.evidence} {weighted.remedy}"


def test_scale_alone_would_miss_ragged_tokens() -> None:
    """The reason why B01 needs weights: accumulated ≈ 1.0 × full, and yet far from equal."""
    verdict = next(case for case in FAULTS if case.id == "B01").verify()
    reference = sum(row.reference_norm**2 for row in verdict.parameters) ** 0.5
    accumulated = sum(row.accumulated_norm**2 for row in verdict.parameters) ** 0.5
    difference = sum(row.difference_norm**2 for row in verdict.parameters) ** 0.5
    assert 0.5 < accumulated / reference < 2
    assert difference / reference > 0.1


def _verify(problem: gaverify.Problem, steps: int = 4, **options) -> gaverify.Verdict:
    return gaverify.verify(problem, steps=steps, **options)


def test_an_iterator_whose_values_nothing_reads_is_not_named() -> None:
    (finding,) = faults_of("schedule-of-2")
    assert finding.code == "GAV403" and "`schedule`" in finding.summary and "`calls`" not in finding.summary


def test_gradients_of_zero_prove_nothing() -> None:
    verdict = _verify(problems_traps.sine_of_zero())
    assert verdict.outcome is Outcome.INCONCLUSIVE, story(verdict)
    assert "GAV901" in note_codes(verdict)


@pytest.mark.parametrize(
    ("size", "weighting", "lost"), [(64, "none", True), (63, "uniform", True), (64, "norm", False)]
)
def test_bits_lost_beside_a_fault_are_those_of_adding_up(size: int, weighting: str, lost: bool) -> None:
    """A fault is the same in float64, and no rounding. Micro-batches that round themselves lose no bits in a sum."""
    problem, norm = problems_state.low_precision(), nn.BatchNorm1d(8, dtype=torch.bfloat16)
    if weighting == "norm":
        problem.model.insert(1, norm)
    batch = problem.batch[0][:size], problem.batch[1][:size]
    weighting = weighting if weighting == "none" else "uniform"
    verdict = gaverify.verify(problem.model, problem.loss, batch, steps=32, weighting=weighting)
    assert verdict.outcome is Outcome.DIVERGENT and ("GAV501" in note_codes(verdict)) == lost, story(verdict)
    errors = [finding.evidence[0].values["accumulated"] for finding in verdict.findings if finding.code == "GAV501"]
    assert all(1e-3 < error < 0.05 for error in errors)


def _tokens(problem: gaverify.Problem, pad: int, masks: bool) -> gaverify.Problem:
    """The same with tokens that a mask hides, or none; -1 marks targets to ignore, of which there are some or none."""
    tokens, labels = problem.batch["tokens"], problem.batch["labels"].clone()
    labels[:, pad:] = -1
    mask = torch.ones_like(tokens)
    mask[0, 5:] = int(not masks)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scores = model(batch["tokens"] * batch["attention_mask"])
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1)

    return gaverify.Problem(problem.model, loss, {"tokens": tokens, "attention_mask": mask, "labels": labels})


@pytest.mark.parametrize(
    ("pad", "masks", "words"),
    [
        (6, False, "no target is -1, which the loss ignores, `batch['attention_mask']` hides nothing: padded samples"),
        (6, True, "no target is -1, which the loss ignores: padded samples were not tested"),
        (4, True, "every micro-batch has 8 valid targets"),
    ],
)
def test_a_batch_without_padding_says_that_padding_was_not_tested(pad: int, masks: bool, words: str) -> None:
    torch.manual_seed(0)
    batch = token_batch((6,) * 8)
    verdict = _verify(_tokens(gaverify.Problem(language_model(), token_loss, batch), pad, masks))
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    assert next(finding for finding in verdict.findings if finding.code == "GAV901").summary.startswith(words)


def test_one_micro_batch_is_told_to_take_more() -> None:
    (finding,) = _verify(problems_weights.mean_loss(), steps=1).findings
    assert finding.code == "GAV901" and finding.remedy == "compare at least two micro-batches (`--steps 2`)"


def test_a_loss_that_is_no_number_beside_gradients_that_agree_gets_a_note() -> None:
    problem = problems_weights.some_ignored()
    problem.batch[1][2:4] = -100
    verdict = _verify(problem, steps=5, weighting="tokens")
    assert verdict.outcome is Outcome.EQUIVALENT and "GAV503" in note_codes(verdict), story(verdict)


def test_identical_samples_are_no_green_tick() -> None:
    """Nothing but a wrong scale could have shown, and that still does."""
    verdict = _verify(problems_traps.all_the_same())
    assert verdict.outcome is Outcome.INCONCLUSIVE, story(verdict)
    assert "GAV901" in note_codes(verdict), story(verdict)
    assert "identical" in sentence(verdict)
    scaled = _verify(problems_traps.all_the_same(), weighting="none")
    assert scaled.outcome is Outcome.DIVERGENT and fault_codes(scaled) == {"GAV201"}, story(scaled)


def test_identical_samples_that_drop_out_differently_tell() -> None:
    """Their activations differ, so that what couples them would show: a note, no more."""
    problem = problems_traps.all_the_same()
    problem.model = torch.nn.Sequential(torch.nn.Dropout(0.5), problem.model)
    verdict = _verify(problem)
    assert verdict.outcome is Outcome.DIVERGENT and fault_codes(verdict) == {"GAV101"}, story(verdict)
    assert "GAV901" in note_codes(verdict), story(verdict)


@pytest.mark.parametrize("problem", [problems_coupling.batch_norm, problems_weights.mean_loss])
def test_different_samples_are_no_uninformative_batch(problem) -> None:
    assert "GAV901" not in note_codes(_verify(problem()))


@pytest.mark.parametrize(
    ("problem", "steps", "sentence"),
    [
        (problems_coupling.batch_norm, 16, "at least two samples"),
        (problems_traps.not_a_number, 4, "nan"),
        (problems_traps.frozen_altogether, 4, "frozen"),
        (problems_traps.without_parameters, 4, "no parameters"),
        (problems_traps.disagreeing_rows, 4, "leading dimensions of the batch disagree"),
        (problems_weights.mean_loss, 17, "17"),
        (problems_weights.mean_loss, 0, "at least 1"),
    ],
)
def test_what_cannot_be_verified_says_why(problem, steps: int, sentence: str) -> None:
    with pytest.raises(ProblemError) as raised:
        _verify(problem(), steps)
    assert sentence in str(raised.value).lower()
    assert "\n" not in str(raised.value).strip()


@pytest.mark.parametrize("seed", range(6))
def test_dropout_does_not_agree_by_luck(seed: int) -> None:
    """Masks are dealt out, not seeded anew: many seeds, one and two layers, and a fault beside them is still found."""
    verdict = gaverify.verify(problems_state.computed_once(), steps=4, seed=seed)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    verdict = gaverify.verify(problems_state.computed_once(), steps=4, seed=seed, weighting=(0.25, 0.25, 0.25, 0.2501))
    assert verdict.outcome is Outcome.DIVERGENT, story(verdict)


@pytest.mark.parametrize("relative", [1e-2, 1e-3, 1e-4, 6e-5, 1e-5])
def test_small_faults_are_found(relative: float) -> None:
    """One weight is off by as little as the smallest true fault on record (6e-5), and less."""
    verdict = _verify(problems_weights.mean_loss(), weighting=(0.25, 0.25, 0.25, 0.25 * (1 + relative)))
    assert verdict.outcome is Outcome.DIVERGENT, story(verdict)
    assert fault_codes(verdict) == {"GAV202"}, story(verdict)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_size_of_the_loss_hides_nothing(factor: float) -> None:
    problem = problems_coupling.batch_norm()
    inner = problem.loss
    problem.loss = lambda model, batch: factor * inner(model, batch)
    verdict = _verify(problem)
    assert verdict.outcome is Outcome.DIVERGENT
    assert fault_codes(verdict) == {"GAV101"}, story(verdict)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("id", ["A01", "B01", "B02", "B13"])
def test_faults_are_found_in_every_precision(id: str, dtype: str) -> None:
    """bfloat16 rounds more than some faults differ; the verdict is the same."""
    case = next(case for case in FAULTS if case.id == id)
    replace(case, options={**case.options, "dtype": dtype}).check()


def test_no_diagnosis_keeps_the_outcome() -> None:
    verdict = _verify(problems_coupling.batch_norm(), diagnose=False)
    assert verdict.outcome is Outcome.DIVERGENT
    assert "GAV101" not in fault_codes(verdict)


def test_tolerances_mean_what_assert_close_means() -> None:
    """On request: a tolerance wide enough passes what the verdict would flag, and zero flags what it would pass."""
    off = (0.25, 0.25, 0.25, 0.2501)
    assert _verify(problems_weights.mean_loss(), weighting=off, rtol=0.5, atol=0.5).outcome is Outcome.EQUIVALENT
    assert _verify(problems_weights.mean_loss(), weighting=off, rtol=0.0, atol=1e-9).outcome is Outcome.DIVERGENT


@pytest.mark.parametrize("problem", problems_traps.UNALIGNED)
def test_unaligned_draw_is_not_blamed_on_the_loss_or_a_module(problem) -> None:
    """Loss and modules are innocent; where the draws cannot be dealt out, nothing else may be claimed."""
    verdict = _verify(problem())
    if verdict.outcome is Outcome.EQUIVALENT:  # they could be dealt out after all
        assert "GAV301" in note_codes(verdict), story(verdict)
    else:
        assert fault_codes(verdict) == {"GAV302"}, story(verdict)


@pytest.mark.parametrize("weighting", ["uniform", "tokens"])
def test_draws_of_rows_that_nothing_tells_apart_prove_no_fault(weighting: str) -> None:
    """Python sorts the samples, and time steps look alike: the draws decide nothing, and hide no wrong weights."""
    problem = problems_weights.packed_tokens(of_inputs=True, evenly=False, sorts_unseen=True)
    verdict = _verify(problem, weighting=weighting)
    note = next(finding for finding in verdict.findings if finding.code == "GAV302")
    assert not note.proven and note.severity == "note", story(verdict)
    if weighting == "tokens":
        assert verdict.outcome is Outcome.INCONCLUSIVE, story(verdict)
        assert fault_codes(verdict) == set() and note_codes(verdict) == {"GAV302"}, story(verdict)
        assert "--mode eval" in note.remedy
    else:
        assert fault_codes(verdict) == {"GAV202"}, story(verdict)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in COMBINED])
def test_every_cause_is_named_and_no_other(case: Case) -> None:
    verdict = case.check()
    assert fault_codes(verdict) == case.codes, f"{case.why}\n{story(verdict)}"
    assert all(finding.proven for finding in verdict.findings if finding.severity == "fault"), story(verdict)


def test_two_causes_of_one_code_are_both_named() -> None:
    assert len({finding.location.line for finding in faults_of("two-mixtures") if finding.code == "GAV102"}) == 2


def test_a_queue_is_told_apart_from_in_batch_negatives_and_named_as_the_losss_own() -> None:
    queue = next(finding for finding in faults_of("queue-and-negatives") if finding.code == "GAV403")
    assert queue.location is not None and queue.location.module == "criterion" and queue.location.kind == "Queue"
    assert any("restoring it alone changes" in evidence.statement for evidence in queue.evidence)


def test_a_scale_beside_state_is_one_factor_and_was_tested_with_the_state_held() -> None:
    """A moving average divides every micro-batch by a number of its own: that of this window is no weight."""
    for id in ("divisor-and-scale", "moved-divisor-and-scale"):
        scale = next(finding for finding in faults_of(id) if finding.code == "GAV201")
        assert "0.25 times the full batch's (= 1/K)" in scale.summary
        assert (
            scale.remedy
            == "multiply each micro-batch's loss by 4 (loss weights 1, 1, 1, 1); gaverify ran it with the state kept "
            "fixed: equivalent"
        )


@pytest.mark.parametrize("id", ["empty-average-and-whitening", "empty-average-and-norm", "empty-average-and-counter"])
def test_behind_what_is_not_finite_the_other_causes_are_proven_by_numbers(id: str) -> None:
    """The window's counts stay in every other control: without them nothing can be compared."""
    first, second = map(control_of, faults_of(id)[:2])
    assert "the other causes listed explain it" in first.statement
    assert second.values["left"] < 1e-6


def test_behind_what_is_not_finite_a_control_explains_its_share() -> None:
    norm = next(finding for finding in faults_of("empty-average-norm-and-whitening") if finding.code == "GAV101")
    assert 0.1 < control_of(norm).values["explained"] < 0.9


def _summed(size: float, reduction: str = "sum") -> gaverify.Problem:
    """A loss over the samples beside a norm of all outputs, `size` times as large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        scores = model(batch[0])
        return F.cross_entropy(scores, batch[1], reduction=reduction) + size * scores.norm()

    return gaverify.Problem(model, loss, (torch.randn(16, 6), torch.randint(3, (16,))))


@pytest.mark.parametrize("size", [3e-3, 1e-5, 3e-6])
@pytest.mark.parametrize(("reduction", "weighting"), [("sum", "uniform"), ("mean", "none")])
def test_weights_that_explain_nearly_everything_are_named_before_a_small_coupling(
    size: float, reduction: str, weighting: str
) -> None:
    verdict = gaverify.verify(_summed(size, reduction), steps=4, weighting=weighting)
    weights, coupling = faults_in(verdict)
    assert (weights.code, weights.proven) == ("GAV201", True), story(verdict)
    assert (coupling.code, coupling.proven) == ("GAV103", True), story(verdict)
    assert "the other causes listed explain it" in weights.evidence[1].statement
    assert weights.remedy.startswith("fix 1 of 2") and coupling.remedy.startswith("fix 2 of 2")
    assert any("With the other causes removed, it alone" in each.statement for each in coupling.evidence)


@pytest.mark.parametrize("size", [1e-2, 1e-3])
def test_what_a_small_coupling_divides_by_is_no_count_of_the_window(size: float) -> None:
    """A spectral convergence: a norm over that of the targets, which has a square root's share in each micro-batch."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        missed = batch[1] - model(batch[0])
        return missed.abs().sum() + size * missed.norm() / batch[1].norm()

    problem = _summed(0.0)
    verdict = gaverify.verify(problem.model, loss, (problem.batch[0], torch.randn(16, 3)), steps=4)
    weights = verdict.findings[0]
    assert (weights.code, weights.proven) == ("GAV201", True), story(verdict)
    assert "`sum`" in weights.remedy and "`div`" not in weights.remedy


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-9])
def test_what_rounding_hides_is_no_cause_beside_weights(size: float) -> None:
    """Nor does it make of the full batch one that does not repeat itself."""
    verdict = gaverify.verify(_summed(size), steps=4)
    (finding,) = faults_in(verdict)
    assert finding.code == "GAV201" and finding.proven, story(verdict)
    assert "(loss weights 1, 1, 1, 1); gaverify ran it: equivalent" in finding.remedy


def test_a_coupling_beside_a_mean_brings_no_weights_into_play() -> None:
    verdict = gaverify.verify(_summed(1e-3, "mean"), steps=4)
    assert [finding.code for finding in faults_in(verdict)] == ["GAV103"], story(verdict)


@pytest.mark.parametrize("line", ["return F.cross_entropy(scores, batch[1])", "return total / keep.sum()"])
def test_the_line_that_counts_is_named(line: str) -> None:
    """The loss call of a mean over valid targets, and the division of a mean that is written by hand."""
    problem = _summed(0.0)
    problem.batch[1][[1, 5, 6, 13]] = -100

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        scores, keep = model(batch[0]), (batch[1] >= 0).to(batch[0].dtype)
        if "keep" not in line:
            return F.cross_entropy(scores, batch[1])
        total = (scores.logsumexp(1) * keep).sum()
        return total / keep.sum()

    (finding,) = faults_in(gaverify.verify(problem.model, loss, problem.batch, steps=4))
    assert finding.code == "GAV202" and finding.proven
    assert linecache.getline(finding.location.file, finding.location.line).strip() == line


def test_the_share_of_a_cause_is_shown() -> None:
    texts = [" ".join(evidence.statement for evidence in finding.evidence) for finding in faults_of("renorm")]
    assert all("alone" in text for text in texts), texts


SIZES = (6e-5, pytest.param(1e-5, marks=pytest.mark.slow), 3e-6)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_fault_is_seen(family: str, kind: str, size: float, seed: int) -> None:
    problem, options, planted = problems_small.planted(family, kind, size, seed)
    assert size / 6 < planted <= 1.01 * size, "what was planted, by hand in float64"
    verdict = gaverify.verify(problem, diagnose=False, **options)
    assert verdict.outcome is Outcome.DIVERGENT, story(verdict)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_fault_nothing_is_seen(family: str, seed: int) -> None:
    problem, options, planted = problems_small.planted(family, "weight", 0.0, seed)
    assert planted < 1e-12
    verdict = gaverify.verify(problem, diagnose=False, **options)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
