"""What an update is compared at beside its gradient, two models side by side, and calls that have no values."""

from __future__ import annotations

import pytest
from audits import audit, marked

slow = pytest.mark.slow


@slow
class TestAveragesByHand:
    """L10 without a call of torch's: tensors, copied modules and objects of a script's own."""

    SCRIPT = "loops_averages.py"

    def test_one_that_is_made_anew_for_every_micro_batch(self) -> None:
        result = audit(self.SCRIPT, common="--average replaced --when after")
        assert (result.code, result.faults, result.notes) == (0, set(), {"GAV402"}), str(result)
        assert "4 times in the window of update 2" in result.finding("GAV402")["summary"]

    def test_one_whose_decay_counts_micro_batches(self) -> None:
        result = audit(self.SCRIPT, common="--average warmed --when after")
        assert (result.code, result.faults, result.notes) == (1, {"GAV609"}, {"GAV402"}), str(result)

    def test_every_way_to_write_one_is_quiet_once_per_update(self) -> None:
        """A snapshot, a frozen teacher and counters beside them, and a loss that uses what the average gives."""
        result = audit(self.SCRIPT, common="--average together --when update --target")
        assert (result.code, result.outcome, result.faults, result.notes) == (0, "equivalent", set(), set()), str(
            result
        )


@slow
class TestSeveralOptimizers:
    """S11: each has windows of its own."""

    @pytest.mark.parametrize(("loop", "line"), [("against_at_once", "pollutes"), ("in_one_loop", "in_one_loop")])
    def test_networks_that_are_trained_at_once_are_named_as_that(self, loop: str, line: str) -> None:
        """S03: the generator's passes are in the critic's gradients, and it meets the critic before its step."""
        result = audit("loops_partners.py", common=f"--loop {loop}", options=("--updates", "4"))
        assert (result.code, result.faults) == (1, {"GAV610", "GAV611"}), str(result)
        assert result.line("GAV610") == result.line("GAV611") == marked("loops_partners.py", line), str(result)
        updates = result.document["updates"]
        assert any(update["foreign"] and update["foreign"]["passes"] for update in updates), str(updates)
        assert any(partner["full"] > partner["accumulated"] for update in updates for partner in update["partners"])


HIDDEN = ["meta", "fake", "grad", "jvp", "trace", "flops", "forward_mode", "functional", "lazy_optimizer", "lr"]
MARKS = {"meta": ()}


@pytest.mark.parametrize("odd", [pytest.param(odd, marks=MARKS.get(odd, slow)) for odd in HIDDEN])
def test_what_has_no_values_is_left_out(odd: str) -> None:
    """S14: a forward or optimizer that cannot be recorded ends no audit."""
    full, accumulated = "--batch-size 8 --accum 1", "--batch-size 2 --accum 4"
    result = audit("odd_beside.py", full, accumulated, f"--odd {odd}")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
    if odd == "meta":  # it belongs to no update
        assert {row["backward"] for row in result.document["counts"]} == {4}, str(result)
    assert bool(result.document["left_out"]) == (odd in {"meta", "fake", "grad", "jvp", "trace", "lazy_optimizer"})
