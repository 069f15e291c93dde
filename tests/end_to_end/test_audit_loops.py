"""Plain training loops, unchanged: every fault of the loop is named with its line, every look-alike stays quiet."""

from __future__ import annotations

import runpy
from typing import NamedTuple

import pytest
from audits import SCRIPTS, Audited, audit, marked

SCALE, STEPS, EXTRAS, RIGHT = "loops_scale.py", "loops_steps.py", "loops_extras.py", "loops_right.py"
RARE = "loops_rare.py"
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
    Fault("B05 divided twice", SCALE, "divided_twice", "GAV201"),
    Fault("a penalty that is not divided", SCALE, "penalty_undivided", "GAV201"),
    Fault("a penalty that is not divided, from update 2 on", SCALE, "penalty_later", "GAV201"),
    Fault("L19 scaled after backward", SCALE, "scaled_after_backward", "GAV201"),
    Fault("B04 short window over K", SCALE, "short_window", "GAV605", ("GAV201",), common="--samples 24"),
    Fault(
        "B13 micro-batches of 6, 6, 4",
        SCALE,
        "ragged_batches",
        "GAV202",
        full="--micro 16",
        accumulated="--micro 6",
        quick=True,
    ),
    Fault("B11 mean over matched × batch size", SCALE, "matched_targets", "GAV202"),
    Fault("a micro-batch without labels", SCALE, "empty_micro_batch", "GAV203", ("GAV202",)),
    Fault("B01 mean over valid tokens", WORDS, "mean_of_means", "GAV202", (), *LESS, "--dropout 0.1"),
    Fault("B06 the model ignores the count", WORDS, "count_ignored", "GAV201", (), *LESS, "--equal"),
    Fault(
        "B09 tokens of another window",
        WORDS,
        "tokens_of_another_window",
        "GAV201",
        (),
        "--batch-size 8 --accum 1 --generated 1",
        "--batch-size 2 --accum 4 --generated 8",
    ),
    Fault("B14 one row's length, then / K", WORDS, "length_of_a_row", "GAV201", (), *LESS, "--equal"),
    Fault("L01 zero_grad inside the window", STEPS, "cleared_inside", "GAV603", quick=True),
    Fault("cleared twice, in a closure", RARE, "cleared_in_a_closure", "GAV603"),
    Fault("L02 zero_grad at the start of an epoch", STEPS, "cleared_at_epoch", "GAV604", common="--samples 24"),
    Fault("L03 the trailing window leaks", STEPS, "leaks_into_next_epoch", "GAV602", common="--samples 24"),
    Fault("L06 step outside the if", STEPS, "step_outside_the_if", "GAV601"),
    Fault("row 9 scheduler per micro-batch", EXTRAS, "schedule_per_micro_batch", "GAV607", quick=True),
    Fault("clipping per micro-batch, active", EXTRAS, "clip_per_micro_batch", "GAV606", common="--clip 0.05"),
    Fault("clipping by hand per micro-batch", EXTRAS, "clip_by_hand_per_micro_batch", "GAV606", common="--clip 0.05"),
]


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.why, marks=() if fault.quick else slow) for fault in FAULTS]
)
def test_a_faulty_loop_is_named_with_its_line(fault: Fault) -> None:
    result = fault.run()
    assert result.code == 1, str(result)
    assert fault.code in result.faults, str(result)
    assert result.faults <= {fault.code, *fault.also}, str(result)
    assert result.line(fault.code) == marked(fault.script, fault.loop), str(result)


RIGHT_LOOPS = [
    ("N07 gradients divided after the loop", RIGHT, "gradients_divided", ""),
    ("N08 one backward over the summed losses", RIGHT, "losses_summed", ""),
    ("a penalty that is divided with the loss", SCALE, "penalty_divided", ""),
    ("N09 zero_grad at the start of the window", RIGHT, "cleared_at_start", ""),
    ("N18 only the logged loss is off", RIGHT, "logged_loss_off", ""),
    ("N19 constant divisor", RIGHT, "constant_divisor", ""),
    ("N27 micro-batches in another order", RIGHT, "other_order", "--dropout 0.2"),
    ("twin of B04", RIGHT, "short_window_divided", "--samples 24"),
    ("gradients set to None by hand", RIGHT, "cleared_by_hand", ""),
    ("the usual loop, shuffled, with workers and dropout", RIGHT, "usual", "--shuffle --workers 2 --dropout 0.2"),
    ("N26 clipping that never clips", EXTRAS, "clip_per_update", ""),
    ("DistributedDataParallel with no_sync", RARE, "distributed", ""),
    ("sums kept outside .grad", RARE, "sums_of_its_own", ""),
    ("two passes over each window", RARE, "sharpness_aware", ""),
    ("LBFGS", RARE, "line_search", ""),
    ("a compiled model", RARE, "compiled", ""),
    ("loss scales that overflow", RARE, "overflowing", ""),
    ("a gradient penalty on the inputs", RARE, "gradient_penalty", ""),
    ("clamped weights, validation with gradients on", RARE, "clamped", ""),
    ("twin of row 9", EXTRAS, "schedule_per_update", ""),
    ("twin of L08", EXTRAS, "scaler_per_update", ""),
]


@pytest.mark.parametrize(
    ("why", "script", "loop", "common"),
    [pytest.param(*case, id=case[0], marks=() if "workers" in case[3] else slow) for case in RIGHT_LOOPS],
)
def test_a_right_loop_stays_quiet(why: str, script: str, loop: str, common: str) -> None:
    result = audit(script, common=f"--loop {loop} {common}")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)


RIGHT_WINDOWS = [
    ("N20 divided by the tokens of the window", "tokens_of_the_window", *LESS, "--dropout 0.1"),
    ("row 7 padding counted", "padding_counted", *LESS, ""),
]


@slow
@pytest.mark.parametrize(("why", "loop", "full", "accumulated", "common"), RIGHT_WINDOWS, ids=lambda value: value)
def test_a_right_language_model_stays_quiet(why: str, loop: str, full: str, accumulated: str, common: str) -> None:
    result = audit(WORDS, full, accumulated, f"--loop {loop} {common}")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)


@slow
def test_ragged_micro_batches_weighted_by_their_samples_are_equivalent() -> None:
    result = audit(RIGHT, "--micro 16", "--micro 6", "--loop weighted_by_samples")
    assert (result.code, result.faults) == (0, set()), str(result)


class TestNumbers:
    """What the findings say beside their code; the runs are those of the tables above."""

    @slow
    def test_a_forgotten_division_is_a_factor_of_k(self) -> None:
        result = audit(SCALE, common="--loop division_forgotten")
        assert result.update(1)["norm_ratio"] == pytest.approx(4, rel=1e-4)
        assert "K" in result.finding("GAV201")["summary"]

    def test_unequal_micro_batches_get_their_shares_as_weights(self) -> None:
        result = audit(SCALE, "--micro 16", "--micro 6", "--loop ragged_batches")
        assert weights(result) == pytest.approx([6 / 16, 6 / 16, 4 / 16], rel=1e-4), str(result)

    @slow
    def test_windows_of_tokens_are_weighted_by_their_valid_tokens(self) -> None:
        result = audit(WORDS, *LESS, "--loop mean_of_means --dropout 0.1")
        text = runpy.run_path(str(SCRIPTS / "sentences.py"))["TEXT"]
        words = [len(line.split()) for line in text[:8]]  # one target each
        shares = [sum(words[at : at + 2]) / sum(words) for at in range(0, 8, 2)]
        assert weights(result) == pytest.approx(shares, rel=1e-4), str(result)

    def test_every_window_has_its_counts(self) -> None:
        """Row 3: backward : step : zero_grad = K : 1 : 1."""
        result = audit(RIGHT, common="--loop usual --shuffle --workers 2 --dropout 0.2")
        counts = [(c["backward"], c["step"], c["zero_grad"]) for c in result.document["counts"] if c["complete"]]
        assert counts[:2] == [(4, 1, 1)] * 2, str(result)


def weights(result: Audited) -> list[float]:
    """The weights that GAV202 calls right."""
    found = [
        evidence["values"]["weights"]
        for evidence in result.finding("GAV202")["evidence"]
        if "weights" in evidence["values"]
    ]
    assert found, str(result)
    return list(found[0])
