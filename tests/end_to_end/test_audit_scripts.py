"""Training scripts of other kinds, unchanged: reference systems, modules, click, two optimizers, events alone."""

from __future__ import annotations

import pytest
from audits import audit, events_of, marked

STEPS, EXTRAS, RIGHT, RARE = "loops_steps.py", "loops_extras.py", "loops_right.py", "loops_rare.py"
slow = pytest.mark.slow


class TestReferenceSystems:
    """Rows 4 and 8; rows 3 and 9 are in test_audit_loops, row 10 is in test_audit_frameworks."""

    @slow
    def test_the_loop_that_steps_too_early_has_both_faults(self) -> None:
        result = audit(STEPS, common="--loop too_early")
        assert result.code == 1, str(result)
        assert result.faults == {"GAV601", "GAV201"}, str(result)
        assert result.line("GAV601") == marked(STEPS, "too_early")
        assert result.line("GAV201") == marked(STEPS, "too_early, the scale")

    @slow
    def test_the_published_digit_classifier_is_k_times_too_large(self) -> None:
        result = audit("digits.py", "--batch-size 128 --accum 1", "--batch-size 32 --accum 4")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
        assert result.update(1)["norm_ratio"] == pytest.approx(4, rel=1e-3)
        assert result.line("GAV201") == marked("digits.py", "scale")

    @slow
    def test_divided_by_k_only_its_short_window_is_left(self) -> None:
        result = audit("digits.py", "--batch-size 128 --accum 1", "--batch-size 32 --accum 4", "--divide constant")
        assert result.code == 1, str(result)
        assert "GAV605" in result.faults, str(result)
        assert result.faults <= {"GAV605", "GAV201"}, str(result)
        assert result.update(1)["outcome"] == "equivalent"


class TestOtherScripts:
    """Other ways to write a script: modules, click, two optimizers, checkpointing."""

    @slow
    @pytest.mark.parametrize("form", ["", "--table"])
    @pytest.mark.parametrize("forgotten", [False, True])
    def test_boxes_that_count_their_images(self, form: str, forgotten: bool) -> None:
        arguments = "--batch-size 8", "--batch-size 2 --accum 4"
        result = audit("detection.py", *arguments, f"{form} {'--forgotten' * forgotten}".strip())
        assert (result.code, result.faults) == ((1, {"GAV201"}) if forgotten else (0, set())), str(result)
        assert "GAV302" not in str(result)
        if forgotten:
            assert result.line("GAV201") == marked("detection.py", "forgotten")

    @slow
    def test_checkpointed_blocks_with_dropout(self) -> None:
        result = audit("train_checkpointed.py")
        assert (result.code, result.faults) == (0, set()), str(result)
        assert "GAV301" in result.notes


@slow
def test_micro_batches_without_a_backward_pass_are_named() -> None:
    result = audit(STEPS, common="--loop backward_at_the_boundary")
    assert (result.code, result.outcome) == (1, "divergent"), str(result)
    assert result.faults == {"GAV203"} and "3 of 4 do not reach" in result.finding("GAV203")["summary"], str(result)
    for window in (1, 2):
        result = audit(STEPS, common=f"--loop skipping --skipped {window}")
        assert (result.code, result.faults) == (1, {"GAV203"}), str(result)
        assert result.line("GAV203") == marked("loops_steps.py", "skipping")


@slow
def test_batch_statistics_are_no_fault_of_the_loop() -> None:
    """A01, D01: the gradients differ, the running statistics drift, and no line of the loop is blamed."""
    result = audit(RIGHT, common="--loop usual --batchnorm")
    assert (result.code, result.outcome) == (1, "divergent"), str(result)
    assert "GAV402" in result.notes, str(result)
    assert not {code for code in result.faults if code.startswith(("GAV2", "GAV6"))}, str(result)


@slow
def test_random_draws_outside_the_model_are_dealt_or_named() -> None:
    result = audit(RARE, common="--loop dropout_in_the_loss --dropout 0.3")
    assert result.code == 0 or "GAV302" in result.faults | result.notes, str(result)


class TestEventsOnly:
    """One run of the script, its calls alone."""

    @pytest.mark.parametrize(
        ("why", "script", "loop", "code", "common", "steps"),
        [
            pytest.param("L02", STEPS, "cleared_at_epoch", "GAV604", "--samples 24", ""),
            pytest.param("row 4", STEPS, "too_early", "GAV601", "--samples 36", ""),
            pytest.param("L03", STEPS, "never_cleared", "GAV602", "", "", marks=slow),
            pytest.param("L05", STEPS, "all_but_the_boundary", "GAV601", "", "4", marks=slow),
            pytest.param("L08", EXTRAS, "scaler_per_micro_batch", "GAV608", "", "", marks=slow),
            pytest.param("L11", STEPS, "decay_by_hand", "GAV601", "", "", marks=slow),
            pytest.param("L12", STEPS, "step_in_a_hook", "GAV601", "", "4", marks=slow),
        ],
        ids=lambda value: value if len(value) < 6 else "",
    )
    def test_events_tell_where_the_loop_is_wrong(
        self, why: str, script: str, loop: str, code: str, common: str, steps: str
    ) -> None:
        result = events_of(
            script, f"--loop {loop} --batch-size 4 --accum 4 {common}", ("--steps", steps) if steps else ()
        )
        assert (result.code, result.faults) == (1, {code}), str(result)
        assert result.line(code) == marked(script, loop), str(result)

    @slow
    def test_an_average_of_weights_per_micro_batch_is_a_note(self) -> None:
        """L10: the gradients agree."""
        result = audit(EXTRAS, common="--loop average_per_micro_batch")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
        assert result.notes, str(result)

    def test_a_right_loop_has_no_fault(self) -> None:
        """Nothing was compared, so it is not called equivalent."""
        result = events_of(RIGHT, "--loop usual --batch-size 4 --accum 4")
        assert (result.code, result.faults) == (3, set()), str(result)
