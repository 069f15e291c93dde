"""Plain training loops, unchanged: every fault of the loop is named with its line, every look-alike stays quiet."""

from __future__ import annotations

import runpy
from typing import NamedTuple

import pytest
from audits import SCRIPTS, Audited, audit, events_of, folder, marked

SCALE, STEPS, EXTRAS, RIGHT = "loops_scale.py", "loops_steps.py", "loops_extras.py", "loops_right.py"
WORDS = "train_language_model.py"
LESS = ("--batch-size 8 --accum 1", "--batch-size 2 --accum 4")
slow = pytest.mark.slow


class Fault(NamedTuple):
    """A loop, the code that must appear, and what else may."""

    why: str
    script: str
    loop: str
    code: str
    also: tuple[str, ...] = ()
    full: str = "--batch-size 16 --accum 1"
    accumulated: str = "--batch-size 4 --accum 4"
    common: str = ""
    quick: bool = False

    def run(self) -> Audited:
        return audit(self.script, self.full, self.accumulated, f"--loop {self.loop} {self.common}")


FAULTS = [
    Fault("B02 the division by K is forgotten", SCALE, "division_forgotten", "GAV201"),
    Fault("B02 Adam hides it", SCALE, "division_forgotten", "GAV201", common="--optimizer Adam"),
    Fault("B05 divided twice", SCALE, "divided_twice", "GAV201"),
    Fault("L19 scaled after backward", SCALE, "scaled_after_backward", "GAV201"),
    Fault("B04 short window over K", SCALE, "short_window", "GAV605", ("GAV201",), common="--samples 24"),
    Fault("B13 micro-batches of 6, 6, 4", SCALE, "ragged_batches", "GAV202",
          full="--micro 16", accumulated="--micro 6", quick=True),
    Fault("B11 mean over matched × batch size", SCALE, "matched_targets", "GAV202"),
    Fault("B01 mean over valid tokens", WORDS, "mean_of_means", "GAV202", (), *LESS),
    Fault("B01 with dropout, dealt out per sample", WORDS, "mean_of_means", "GAV202", (), *LESS, "--dropout 0.1"),
    Fault("B06 the model ignores the count", WORDS, "count_ignored", "GAV201", (), *LESS, "--equal"),
    Fault("B09 tokens of another window", WORDS, "tokens_of_another_window", "GAV201", (),
          "--batch-size 8 --accum 1 --generated 1", "--batch-size 2 --accum 4 --generated 8"),
    Fault("B14 one row's length, then / K", WORDS, "length_of_a_row", "GAV201", (), *LESS, "--equal"),
    Fault("L01 zero_grad inside the window", STEPS, "cleared_inside", "GAV603", quick=True),
    Fault("L02 zero_grad at the start of an epoch", STEPS, "cleared_at_epoch", "GAV604", common="--samples 24"),
    Fault("L03 the trailing window leaks", STEPS, "leaks_into_next_epoch", "GAV602", common="--samples 24"),
    Fault("L03 never cleared", STEPS, "never_cleared", "GAV602"),
    Fault("L05 steps on all but the boundary", STEPS, "all_but_the_boundary", "GAV601"),
    Fault("L06 step outside the if", STEPS, "step_outside_the_if", "GAV601"),
    Fault("L11 weight decay by hand", STEPS, "decay_by_hand", "GAV601"),
    Fault("L12 steps in a hook", STEPS, "step_in_a_hook", "GAV601"),
    Fault("row 9 scheduler per micro-batch", EXTRAS, "schedule_per_micro_batch", "GAV607", quick=True),
    Fault("clipping per micro-batch, active", EXTRAS, "clip_per_micro_batch", "GAV606", common="--clip 0.05"),
    Fault("L08 unscale_ and update per micro-batch", EXTRAS, "scaler_per_micro_batch", "GAV608"),
]  # fmt: skip


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.why, marks=() if fault.quick else slow) for fault in FAULTS]
)
def test_a_faulty_loop_is_named_with_its_line(fault: Fault) -> None:
    result = fault.run()
    assert result.code == 1, result
    assert fault.code in result.faults, result
    assert result.faults <= {fault.code, *fault.also}, result
    assert result.line(fault.code) == marked(fault.script, fault.loop), result


RIGHT_LOOPS = [
    ("N07 gradients divided after the loop", RIGHT, "gradients_divided", ""),
    ("N08 one backward over the summed losses", RIGHT, "losses_summed", ""),
    ("N09 zero_grad at the start of the window", RIGHT, "cleared_at_start", ""),
    ("N18 only the logged loss is off", RIGHT, "logged_loss_off", ""),
    ("N19 constant divisor", RIGHT, "constant_divisor", ""),
    ("N27 micro-batches in another order", RIGHT, "other_order", ""),
    ("twin of B04", RIGHT, "short_window_divided", "--samples 24"),
    ("twin of B02 under Adam", RIGHT, "usual", "--optimizer Adam"),
    ("gradients set to None by hand", RIGHT, "cleared_by_hand", ""),
    ("validation between updates", RIGHT, "validates", ""),
    ("the usual loop, shuffled, with workers and dropout", RIGHT, "usual", "--shuffle --workers 2 --dropout 0.2"),
    ("N26 clipping that never clips", EXTRAS, "clip_per_update", ""),
    ("clipping that clips, once per update", EXTRAS, "clip_per_update", "--clip 0.05"),
    ("twin of row 9", EXTRAS, "schedule_per_update", ""),
    ("twin of L10", EXTRAS, "average_per_update", ""),
    ("twin of L08", EXTRAS, "scaler_per_update", ""),
]


@pytest.mark.parametrize(
    ("why", "script", "loop", "common"),
    [pytest.param(*case, id=case[0], marks=() if "workers" in case[3] else slow) for case in RIGHT_LOOPS],
)
def test_a_right_loop_stays_quiet(why: str, script: str, loop: str, common: str) -> None:
    result = audit(script, common=f"--loop {loop} {common}")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), result


RIGHT_WINDOWS = [
    ("N20 divided by the tokens of the window", "tokens_of_the_window", *LESS, ""),
    ("N20 with dropout", "tokens_of_the_window", *LESS, "--dropout 0.1"),
    ("row 7 padding counted", "padding_counted", *LESS, ""),
    ("N22 equal token counts", "mean_of_means", *LESS, "--equal"),
]


@slow
@pytest.mark.parametrize(("why", "loop", "full", "accumulated", "common"), RIGHT_WINDOWS, ids=lambda value: value)
def test_a_right_language_model_stays_quiet(why: str, loop: str, full: str, accumulated: str, common: str) -> None:
    result = audit(WORDS, full, accumulated, f"--loop {loop} {common}")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), result


@slow
def test_ragged_micro_batches_weighted_by_their_samples_are_equivalent() -> None:
    result = audit(RIGHT, "--micro 16", "--micro 6", "--loop weighted_by_samples")
    assert (result.code, result.faults) == (0, set()), result


class TestNumbers:
    """What the findings say beside their code."""

    @slow
    def test_a_forgotten_division_is_a_factor_of_k(self) -> None:
        result = audit(SCALE, common="--loop division_forgotten")
        assert result.update(1)["norm_ratio"] == pytest.approx(4, rel=1e-4)
        assert "K" in result.finding("GAV201")["summary"]

    @slow
    def test_unequal_micro_batches_get_their_shares_as_weights(self) -> None:
        result = audit(SCALE, "--micro 16", "--micro 6", "--loop ragged_batches")
        right = [6 / 16, 6 / 16, 4 / 16]
        assert any(abs(weight - share) < 1e-3 for weight, share in zip(_weights(result, "GAV202"), right, strict=False))
        assert all(f"{share:.4g}" in result.text("GAV202") for share in right), result

    @slow
    def test_windows_of_tokens_are_weighted_by_their_valid_tokens(self) -> None:
        result = audit(WORDS, *LESS, "--loop mean_of_means")
        text = runpy.run_path(str(SCRIPTS / "sentences.py"))["TEXT"]
        words = [len(line.split()) for line in text[:8]]  # one target each
        shares = [sum(words[at : at + 2]) / sum(words) for at in range(0, 8, 2)]
        assert _weights(result, "GAV202") == pytest.approx(shares, rel=1e-3), result

    @slow
    def test_every_window_has_its_counts(self) -> None:
        """Row 3: backward : step : zero_grad = K : 1 : 1."""
        result = audit(RIGHT, common="--loop usual")
        counts = [(c["backward"], c["step"], c["zero_grad"]) for c in result.document["counts"] if c["complete"]]
        assert counts[:2] == [(4, 1, 1)] * 2, result


def _weights(result: Audited, code: str) -> list[float]:
    """The weights that the finding calls right."""
    for evidence in result.finding(code)["evidence"]:
        for name in ("right", "weights", "fitted"):
            if name in evidence["values"]:
                return list(evidence["values"][name])
    raise AssertionError(f"no weights in {result}")


class TestReferenceSystems:
    """Rows 4 and 8; rows 3 and 9 are above, row 10 is in test_audit_frameworks."""

    @slow
    def test_the_loop_that_steps_too_early_has_both_faults(self) -> None:
        result = audit(STEPS, common="--loop too_early")
        assert result.code == 1, result
        assert result.faults == {"GAV601", "GAV201"}, result
        assert result.line("GAV601") == marked(STEPS, "too_early")
        assert result.line("GAV201") == marked(STEPS, "too_early, the scale")

    @slow
    def test_the_published_digit_classifier_is_k_times_too_large(self) -> None:
        result = audit("digits.py", "--batch-size 128 --accum 1", "--batch-size 32 --accum 4")
        assert (result.code, result.faults) == (1, {"GAV201"}), result
        assert result.update(1)["norm_ratio"] == pytest.approx(4, rel=1e-3)
        assert result.line("GAV201") == marked("digits.py", "scale")

    @slow
    def test_divided_by_k_only_its_short_window_is_left(self) -> None:
        result = audit("digits.py", "--batch-size 128 --accum 1", "--batch-size 32 --accum 4", "--divide constant")
        assert result.code == 1, result
        assert "GAV605" in result.faults, result
        assert result.faults <= {"GAV605", "GAV201"}, result
        assert result.update(1)["outcome"] == "equivalent"

    @slow
    def test_divided_by_the_window_it_agrees(self) -> None:
        result = audit("digits.py", "--batch-size 128 --accum 1", "--batch-size 32 --accum 4", "--divide window")
        assert (result.code, result.faults) == (0, set()), result


class TestOtherScripts:
    """Other ways to write a script: modules, click, two optimizers, checkpointing."""

    @slow
    def test_a_module_with_relative_imports(self) -> None:
        with folder(SCRIPTS / "project"):
            result = audit("training.train", "--batch-size 16", "--batch-size 4 --accum 4")
        assert (result.code, result.faults) == (0, set()), result

    @slow
    @pytest.mark.parametrize(("common", "code"), [("--workers 1", 0), ("--no-divide", 1)])
    def test_options_by_click(self, common: str, code: int) -> None:
        result = audit("train_click.py", common=common)
        assert result.code == code, result
        assert result.faults == ({"GAV201"} if code else set()), result
        assert not code or result.line("GAV201") == marked("train_click.py", "divide")

    @slow
    def test_a_gan_with_two_optimizers(self) -> None:
        result = audit("train_gan.py", options=("--updates", "4"))
        assert (result.code, result.faults) == (0, set()), result

    @slow
    def test_a_gan_whose_generator_is_not_divided(self) -> None:
        result = audit("train_gan.py", common="--divide discriminator", options=("--updates", "4"))
        assert (result.code, result.faults) == (1, {"GAV201"}), result
        assert result.line("GAV201") == marked("train_gan.py", "generator")

    @slow
    @pytest.mark.parametrize(("accumulated", "code"), [("", 0), ("--divide-by 1", 1)])
    def test_checkpointed_blocks_with_dropout(self, accumulated: str, code: int) -> None:
        result = audit("train_checkpointed.py", accumulated=f"--batch-size 4 --accum 4 {accumulated}")
        assert result.code == code, result
        assert result.faults == ({"GAV201"} if code else set()), result


class TestEventsOnly:
    """One run of the script, its calls alone."""

    @pytest.mark.parametrize(
        ("loop", "code"),
        [
            pytest.param("cleared_inside", "GAV603", marks=slow),
            pytest.param("cleared_at_epoch", "GAV604"),
            pytest.param("never_cleared", "GAV602", marks=slow),
            pytest.param("leaks_into_next_epoch", "GAV602", marks=slow),
            pytest.param("too_early", "GAV601"),
            pytest.param("decay_by_hand", "GAV601", marks=slow),
        ],
    )
    def test_events_tell_where_the_loop_is_wrong(self, loop: str, code: str) -> None:
        result = events_of(STEPS, f"--loop {loop} --batch-size 4 --accum 4 --samples 24")
        assert result.code == 1, result
        assert code in result.faults, result
        assert result.faults <= {code, "GAV602", "GAV604"}, result
        assert result.line(code) == marked(STEPS, loop), result

    @slow
    @pytest.mark.parametrize(
        ("loop", "code"),
        [("step_outside_the_if", "GAV601"), ("all_but_the_boundary", "GAV601"), ("step_in_a_hook", "GAV601")],
    )
    def test_k_tells_what_the_events_alone_cannot(self, loop: str, code: str) -> None:
        result = events_of(STEPS, f"--loop {loop} --batch-size 4 --accum 4", ("--steps", "4"))
        assert result.code == 1, result
        assert result.faults == {code}, result
        assert result.line(code) == marked(STEPS, loop), result

    @slow
    @pytest.mark.parametrize(
        ("loop", "code", "common"),
        [
            ("schedule_per_micro_batch", "GAV607", ""),
            ("clip_per_micro_batch", "GAV606", "--clip 0.05"),
            ("scaler_per_micro_batch", "GAV608", ""),
        ],
    )
    def test_what_belongs_to_an_update_is_called_per_micro_batch(self, loop: str, code: str, common: str) -> None:
        result = events_of(EXTRAS, f"--loop {loop} --batch-size 4 --accum 4 {common}")
        assert (result.code, result.faults) == (1, {code}), result
        assert result.line(code) == marked(EXTRAS, loop), result

    @slow
    def test_an_average_of_weights_per_micro_batch_is_a_note(self) -> None:
        """L10: the gradients agree."""
        result = audit(EXTRAS, common="--loop average_per_micro_batch")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), result
        assert result.notes, result

    @pytest.mark.parametrize(
        "case", ["loops_right.py usual", pytest.param("loops_extras.py schedule_per_update", marks=slow)]
    )
    def test_a_right_loop_has_no_fault(self, case: str) -> None:
        """Nothing was compared, so it is not called equivalent."""
        script, loop = case.split()
        result = events_of(script, f"--loop {loop} --batch-size 4 --accum 4")
        assert (result.code, result.faults) == (3, set()), result
