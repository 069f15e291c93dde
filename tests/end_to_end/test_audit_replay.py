"""S15: what a loop draws and its loaders give is dealt to the accumulated run; a planted factor is still found."""

from __future__ import annotations

import pytest
from audits import audit, marked

pytestmark = pytest.mark.slow
SCRIPT = "train_drawing.py"
DRAWN = ["diffusion", "mixed", "crops", "one_by_one", "ahead", "shuffled", "augmented", "stream", "sharded", "bucketed"]


@pytest.mark.parametrize("loop", DRAWN)
def test_the_right_loop_is_equivalent(loop: str) -> None:
    result = audit(SCRIPT, common=f"--loop {loop}")
    assert (result.code, result.faults) == (0, set()), str(result)


@pytest.mark.parametrize("loop", ["diffusion", "ahead", "shuffled"])  # by the loop, ahead of it, by a loader
def test_a_forgotten_division_is_found(loop: str) -> None:
    result = audit(SCRIPT, common=f"--loop {loop} --undivided")
    assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
    assert result.line("GAV201") == marked(SCRIPT, "backward") or loop == "ahead"


def test_a_later_shuffle_is_the_full_batchs() -> None:
    result = audit(SCRIPT, common="--loop epochs", options=("--updates", "8"))
    assert (result.code, result.faults) == (0, set()), str(result)
    assert [update["judged"] for update in result.document["updates"]] == [True] * 8


@pytest.mark.parametrize("loop", ["shuffled", "augmented"])
def test_workers_draw_for_themselves(loop: str) -> None:
    result = audit(SCRIPT, common=f"--loop {loop} --workers 2")
    assert (result.code, result.faults) == (0, set()), str(result)


class TestDrawsOfACollateFunction:
    """Masks that are drawn when a batch is collated would be others for its micro-batches: they are its rows."""

    def test_the_right_loop_is_equivalent(self) -> None:
        result = audit(SCRIPT, common="--loop masked")
        assert (result.code, result.faults) == (0, set()), str(result)
        assert "rows of the full batch's batches, and padded like those" in result.document["reason"]

    def test_a_forgotten_division_is_found(self) -> None:
        result = audit(SCRIPT, common="--loop masked --undivided")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
        assert result.line("GAV201") == marked(SCRIPT, "backward")


def test_partners_from_the_whole_batch_are_told_with_their_line() -> None:
    result = audit(SCRIPT, common="--loop partners")
    assert result.code == 3, str(result)
    assert str(marked(SCRIPT, "partners")[1]) in str(result), str(result)


class TestWithoutALoader:
    """Batches from a plain tensor, whose order hangs on the batch size."""

    @pytest.mark.parametrize("loop", ["columns", "by_name"])
    def test_a_model_that_returns_its_loss_is_given_the_full_batches_inputs(self, loop: str) -> None:
        result = audit("train_slices.py", "--batch-size 8", "--batch-size 2 --accum 4", f"--loop {loop}")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
        assert "with the full-batch run's inputs" in {run["how"] for run in result.document["runs"]}

    def test_a_forgotten_division_is_found(self) -> None:
        result = audit("train_slices.py", "--batch-size 8", "--batch-size 2 --accum 4", "--undivided")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)

    def test_targets_outside_the_forward_are_left_alone(self) -> None:
        result = audit("train_slices.py", "--batch-size 8", "--batch-size 2 --accum 4", "--loop outside")
        assert (result.code, result.faults) == (3, set()), str(result)
        assert "did not see the same samples" in result.document["reason"]
        assert "the forward at {}:{}".format(*marked("train_slices.py", "outside")) in result.document["reason"]
