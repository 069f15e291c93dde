"""What an update is compared at beside its gradient, two models side by side, and calls that have no values."""

from __future__ import annotations

import pytest
from audits import audit, marked

slow = pytest.mark.slow


class TestSettings:
    """S02: what a step is made with, at the same update."""

    @pytest.mark.parametrize("what", ["lr", pytest.param("momentum", marks=slow)])
    def test_a_counter_of_micro_batches_is_named_with_its_line(self, what: str) -> None:
        result = audit("loops_rates.py", common=f"--counter micro_batches --what {what}")
        assert (result.code, result.faults) == (1, {"GAV609"}), str(result)
        assert result.line("GAV609") == marked("loops_rates.py", "setting"), str(result)

    @slow
    def test_a_counter_of_updates_stays_quiet(self) -> None:
        result = audit("loops_rates.py", common="--counter updates")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)

    @slow
    def test_an_average_whose_decay_counts_micro_batches(self) -> None:
        result = audit("loops_extras.py", common="--loop average_decay_by_micro_batch")
        assert (result.code, result.faults) == (1, {"GAV609"}), str(result)
        assert result.line("GAV609") == marked("loops_extras.py", "average_decay_by_micro_batch"), str(result)

    @slow
    def test_an_average_whose_decay_counts_updates(self) -> None:
        result = audit("loops_extras.py", common="--loop average_decay_by_update")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)


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
class TestTokensCountedByHand:
    """GAV202 where no loss of torch's counts the targets: log-softmax, gather and a mask."""

    def test_each_micro_batch_by_its_own_tokens(self) -> None:
        result = audit("loops_tokens.py")
        assert (result.code, result.faults) == (1, {"GAV202"}), str(result)
        assert result.line("GAV202") == marked("loops_tokens.py", "tokens"), str(result)
        for words in ("0.2759, 0.2069, 0.2414, 0.2759", "what each micro-batch's loss is divided by"):
            assert words in result.text("GAV202"), str(result)  # 16, 12, 14 and 16 of 58 tokens

    def test_by_those_of_the_window_it_agrees(self) -> None:
        result = audit("loops_tokens.py", common="--by window")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)


@slow
class TestStepsThatDivide:
    """S12: where the weights change alike there is no fault; Adam hides a factor and takes nothing out."""

    @pytest.mark.parametrize("optimizer", ["dividing", "lower_rate"])
    def test_a_step_that_takes_the_factor_out_is_right(self, optimizer: str) -> None:
        result = audit("loops_clipping.py", common=f"--change nothing --undivided --optimizer {optimizer}")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
        assert "takes the factor out" in result.document["reason"]

    def test_a_step_that_divides_a_right_gradient_is_not(self) -> None:
        result = audit("loops_clipping.py", common="--change nothing --optimizer dividing")
        assert (result.code, result.faults) == (1, {"GAV609"}), str(result)

    def test_adam_takes_nothing_out(self) -> None:
        result = audit("loops_clipping.py", common="--change nothing --undivided --optimizer Adam")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)


@slow
class TestSeveralOptimizers:
    """S11: each has windows of its own."""

    @pytest.mark.parametrize("loop", ["interleaved", "shifted", "against"])
    def test_right_loops_stay_quiet(self, loop: str) -> None:
        result = audit("loops_partners.py", common=f"--loop {loop}", options=("--updates", "4"))
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)

    @pytest.mark.parametrize(("loop", "line"), [("against_at_once", "pollutes"), ("in_one_loop", "in_one_loop")])
    def test_networks_that_are_trained_at_once_are_named_as_that(self, loop: str, line: str) -> None:
        """S03: the generator's passes are in the critic's gradients, and it meets the critic before its step."""
        result = audit("loops_partners.py", common=f"--loop {loop}", options=("--updates", "4"))
        assert (result.code, result.faults) == (1, {"GAV610", "GAV611"}), str(result)
        assert result.line("GAV610") == result.line("GAV611") == marked("loops_partners.py", line), str(result)
        updates = result.document["updates"]
        assert any(update["foreign"] and update["foreign"]["passes"] for update in updates), str(updates)
        assert any(partner["full"] > partner["accumulated"] for update in updates for partner in update["partners"])

    def test_undivided_losses_are_a_wrong_scale_and_no_early_step(self) -> None:
        result = audit("loops_partners.py", common="--loop interleaved --undivided", options=("--updates", "4"))
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)


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
