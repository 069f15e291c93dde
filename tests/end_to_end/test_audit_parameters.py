"""Single parameters: a factor of one alone, a wrapper that renames them, terms that cancel, float32 master copies."""

from __future__ import annotations

import pytest
import torch
from audits import audit, marked

pytestmark = pytest.mark.slow


def test_gradients_that_a_hook_sets_are_told_from_those_that_it_adds() -> None:
    """What such passes add is the next gradient less the last, which other weights of micro-batches seem to mend."""
    right = audit("master_weights.py", common="--loop added")
    assert (right.code, right.outcome, right.faults) == (0, "equivalent", set()), str(right)
    wrong = audit("master_weights.py", common="--loop set")
    assert (wrong.code, wrong.faults) == (1, {"GAV603"}), str(wrong)
    assert wrong.line("GAV603") == marked("master_weights.py", "set")
    assert wrong.finding("GAV603")["proven"] and "multiply" not in wrong.text("GAV603")


def test_the_step_of_an_optimizer_inside_another_is_a_part_of_that_one() -> None:
    right = audit("loops_wrapped.py", options=("--updates", "4"))
    assert (right.code, right.outcome, right.faults) == (0, "equivalent", set()), str(right)
    assert [len(update["parameters"]) for update in right.document["updates"]] == [4] * 4, str(right)
    wrong = audit("loops_wrapped.py", common="--loss undivided", options=("--updates", "4"))
    assert (wrong.code, wrong.faults) == (1, {"GAV201"}), str(wrong)
    assert "= K" in wrong.finding("GAV201")["summary"], str(wrong)
    assert wrong.line("GAV201") == marked("loops_wrapped.py", "loss")


@pytest.mark.parametrize("common", ["", "--by window", "--without"])
def test_a_frozen_teacher_in_bfloat16_hides_nothing_of_a_float32_student(common: str) -> None:
    """Of each full batch's 15 points 7 and 8 fall to its micro-batches: the mean of their means is 6 % off."""
    result = audit("train_distilled.py", "--batch-size 16 --accum 1", "--batch-size 8 --accum 2", common)
    if common:
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
        assert result.update(1)["relative_difference"] < 1e-6
    else:
        assert (result.code, result.faults) == (1, {"GAV202"}), str(result)
        assert result.line("GAV202") == marked("train_distilled.py", "distilled")


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch before 2.9")
def test_products_that_torch_rounds_are_judged_by_their_rounding() -> None:
    """The inputs of a convolution are rounded otherwise for each batch size: 2e-3 of the gradient."""
    right = audit("train_rounded.py", options=("--updates", "1"))
    assert (right.code, right.outcome, right.faults) == (0, "equivalent", set()), str(right)
    wrong = audit("train_rounded.py", common="--undivided", options=("--updates", "1"))
    assert (wrong.code, wrong.faults) == (1, {"GAV201"}), str(wrong)
    assert wrong.line("GAV201") == marked("train_rounded.py", "loss")
