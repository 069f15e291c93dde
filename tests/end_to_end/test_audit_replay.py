"""S15: what a loop draws and its loaders give is dealt to the accumulated run; a planted factor is still found."""

from __future__ import annotations

import pytest
from audits import audit, marked

pytestmark = pytest.mark.slow
SCRIPT = "train_drawing.py"


def test_a_later_shuffle_is_the_full_batchs() -> None:
    result = audit(SCRIPT, common="--loop epochs", options=("--updates", "8"))
    assert (result.code, result.faults) == (0, set()), str(result)
    assert [update["judged"] for update in result.document["updates"]] == [True] * 8


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

    def test_targets_outside_the_forward_are_left_alone(self) -> None:
        result = audit("train_slices.py", "--batch-size 8", "--batch-size 2 --accum 4", "--loop outside")
        assert (result.code, result.faults) == (3, set()), str(result)
        assert "did not see the same samples" in result.document["reason"]
        assert "the forward at {}:{}".format(*marked("train_slices.py", "outside")) in result.document["reason"]
