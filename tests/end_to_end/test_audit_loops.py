"""What an audit's document says beside codes and lines: windows, rows, partners, what is left out, and unseen steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from audits import TRAIN, audit, audited, events_of, marked

from gaverify.audit import processes
from gaverify.audit.job import Job
from gaverify.audit.processes import Child

slow = pytest.mark.slow
PROJECTING = ("loops_unusual.py", "--batch-size 16 --accum 1", "--batch-size 4 --accum 4")
SLICED = ("loops_unusual.py", "--batch-size 8", "--batch-size 2 --accum 4")


def test_every_window_has_its_counts() -> None:
    """Row 3: backward : step : zero_grad = K : 1 : 1."""
    result = audit("loops_scale.py", common="--loop usual --shuffle --workers 2 --dropout 0.2")
    counts = [(c["backward"], c["step"], c["zero_grad"]) for c in result.document["calls"]["counts"] if c["complete"]]
    assert counts[:2] == [(4, 1, 1)] * 2, str(result)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_a_loss_that_compares_the_samples_of_each_rank_is_named() -> None:
    """The rest of `loops_ranks.py` is in test_audit_ranks."""
    options = ("--ranks", "2", "--updates", "1")
    result = audit("loops_ranks.py", "--batch-size 8", "--batch-size 4", "--loop gathers_nothing", options)
    assert (result.code, result.faults) == (1, {"GAV103"}), str(result)
    assert result.line("GAV103") == marked("loops_ranks.py", "gathers_nothing")
    assert result.finding("GAV103")["proven"] and "outputs of all micro-batches and ranks" in result.text("GAV103"), (
        str(result)
    )


def test_gradients_that_a_script_transforms_per_micro_batch_are_named_and_not_called_lost() -> None:
    """All four passes reach the step; losses that count otherwise show what became of them."""
    result = audit("loops_rare.py", common="--loop sums_of_its_own --skip nothing", options=("--updates", "1"))
    assert (result.code, result.faults) == (1, {"GAV606"}), str(result)
    text = result.text("GAV606")
    assert result.finding("GAV606")["proven"] and "`0.weight`, `4.weight`" in text and "bias" not in text, str(result)


@pytest.mark.parametrize("loop", ["sharpness_per_micro_batch", "sharpness_inside"])
def test_weights_that_each_micro_batch_moves_are_named(loop: str) -> None:
    """The full batch moves them once, too: sharpness-aware steps."""
    result = audit("loops_rare.py", common=f"--loop {loop}", options=("--updates", "3"))
    assert (result.code, result.faults) == (1, {"GAV601"}), str(result)
    assert result.line("GAV601") == marked("loops_rare.py", "move") and "in the full-batch run once" in str(result)
    assert len(result.document["updates"]) == 3, "a run that moves weights before its first step goes on"


def test_state_of_an_earlier_update_is_not_called_mixing() -> None:
    """It lies in a global dict, and makes the outputs of a module differ from the first micro-batch on."""
    result = audit("loops_carried.py", common="--loop hidden --last")
    assert (result.code, result.faults) == (1, {"GAV403"}) and "SEEN['temperature']" in result.text("GAV403"), str(
        result
    )


def test_weights_are_not_compared_after_the_full_batchs_gradient() -> None:
    """An update that is not judged was given that gradient as well: "weights differ by 0 %" would be no news."""
    result = audit("loops_steps.py", common="--loop all_but_the_boundary")
    updates = result.document["updates"]
    assert updates and not any(update["judged"] for update in updates), str(result)
    assert all(update["step"]["weights_difference"] is None for update in updates), str(result)
    assert "weights differ" not in str(result)


@slow
def test_the_loop_that_steps_too_early_has_both_faults() -> None:
    """Row 4 of the reference systems."""
    result = audit("loops_steps.py", common="--loop too_early")
    assert (result.code, result.faults) == (1, {"GAV601", "GAV201"}), str(result)
    assert result.line("GAV601") == marked("loops_steps.py", "too_early")
    assert result.line("GAV201") == marked("loops_steps.py", "too_early, the scale")


@slow
def test_a_later_shuffle_is_the_full_batchs() -> None:
    result = audit("train_drawing.py", common="--loop epochs", options=("--updates", "8"))
    assert (result.code, result.faults) == (0, set()), str(result)
    assert [update["judged"] for update in result.document["updates"]] == [True] * 8


def test_no_cause_is_searched_of_a_difference_that_other_draws_may_make() -> None:
    """Both runs differ until they are given the same draws: a search before that would take five runs more."""
    result = audit("train_drawing.py", common="--loop targets")
    assert (result.code, result.faults) == (0, set()), str(result)
    assert [run["role"] for run in result.document["runs"]] == ["full", "accumulated", "perturbed"] * 2


@pytest.mark.parametrize(("drop", "pairs"), [(0.0, 2), pytest.param(0.2, 1, marks=slow)])
def test_runs_that_watch_modules_go_side_by_side_unless_draws_are_dealt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop: float, pairs: int
) -> None:
    groups: list[list[str]] = []

    def run_jobs(jobs: Sequence[Job], *others: Any) -> list[Child]:
        groups.append([job.role for job in jobs])
        return processes.run_jobs(jobs, *others)

    monkeypatch.setattr("gaverify.audit.running.run_jobs", run_jobs)
    layers = f"torch.nn.BatchNorm1d(4), torch.nn.Dropout({drop}), torch.nn.Linear(4, 1)"
    result = audited(tmp_path / "train.py", f"model = torch.nn.Sequential({layers})\n{TRAIN}")
    assert (result.code, result.faults) == (1, {"GAV101"}) and result.finding("GAV101")["proven"], str(result)
    assert [len(group) for group in groups].count(2) == pairs, str(groups)


@slow
def test_a_cause_is_searched_once_the_draws_are_the_same() -> None:
    result = audit("train_drawing.py", common="--loop targets --undivided")
    assert (result.code, result.faults) == (1, {"GAV201"}) and result.finding("GAV201")["proven"], str(result)
    assert [run["role"] for run in result.document["runs"]] == ["full", "accumulated", "perturbed"] * 2 + ["weights"]


@slow
def test_partners_from_the_whole_batch_are_told_with_their_line() -> None:
    result = audit("train_drawing.py", common="--loop partners")
    assert result.code == 3, str(result)
    assert str(marked("train_drawing.py", "partners")[1]) in str(result), str(result)


@slow
@pytest.mark.parametrize("inputs", ["columns", "by_name", "outside"])
def test_batches_whose_order_hangs_on_their_size_are_told_with_their_line(inputs: str) -> None:
    result = audit(*SLICED, f"--loop slices --inputs {inputs}")
    assert (result.code, result.faults) == (3, set()), str(result)
    assert "did not see the same samples" in result.document["reason"]
    if inputs == "outside":
        assert "the forward pass at {}:{}".format(*marked("loops_unusual.py", inputs)) in result.document["reason"]


@slow
@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch before 2.9")
@pytest.mark.parametrize(("common", "faults"), [("", set()), (" --undivided", {"GAV201"})], ids=["right", "undivided"])
def test_products_that_torch_rounds_are_judged_by_their_rounding(common: str, faults: set[str]) -> None:
    """The inputs of a convolution are rounded otherwise for each batch size: 2e-3 of the gradient."""
    result = audit("loops_unusual.py", common=f"--loop rounded{common}", options=("--updates", "1"))
    assert (result.code, result.faults) == (len(faults), faults), str(result)
    assert not faults or result.line("GAV201") == marked("loops_unusual.py", "rounded")


@pytest.mark.parametrize("loop", [pytest.param("against_at_once", marks=slow), "in_one_loop"])
def test_networks_that_are_trained_at_once_have_no_false_name(loop: str) -> None:
    """S03: the generator's passes are in the critic's gradients, and it meets the critic before its step."""
    result = audit("loops_partners.py", common=f"--loop {loop}", options=("--updates", "4"))
    assert (result.code, result.outcome, result.faults) == (1, "divergent", set()), str(result)


LEFT_OUT = ("meta", "fake", "grad", "jvp", "trace", "lazy_optimizer")
HIDDEN = (*LEFT_OUT, "flops", "forward_mode", "functional", "lr")


@pytest.mark.parametrize("odd", [pytest.param(odd, marks=() if odd == "meta" else slow) for odd in HIDDEN])
def test_what_has_no_values_is_left_out(odd: str) -> None:
    """S14: a forward or optimizer that cannot be recorded ends no audit."""
    result = audit("odd_beside.py", "--batch-size 8 --accum 1", "--batch-size 2 --accum 4", f"--odd {odd}")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
    if odd == "meta":  # it belongs to no update
        assert {row["backward"] for row in result.document["calls"]["counts"]} == {4}, str(result)
    assert bool(result.document["calls"]["left_out"]) == (odd in LEFT_OUT)


FULL, ACCUMULATED = "--batch-size 8 --accum 1", "--batch-size 2 --accum 4"
SCRIPT = "loops_unannounced.py"
STYLES = ["plain", "own", "assigned", "functional", "compiled", "captured"]
LOOKED_AT = "    norm = torch.autograd.grad(mse_loss(model(x), y), [model.weight])[0].norm().item()\n"


@pytest.mark.parametrize("style", [pytest.param(style, marks=() if style == "plain" else slow) for style in STYLES])
def test_a_right_loop_is_equivalent(style: str) -> None:
    result = audit(SCRIPT, FULL, ACCUMULATED, f"--style {style}")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
    assert all(update["judged"] for update in result.document["updates"])
    how = {run["how"] for run in result.document["runs"]}
    assert any("steps detected by changed weights" in run for run in how) == (style in ("plain", "own"))
    assert any("without compilation" in run for run in how) == (style == "compiled")


@pytest.mark.parametrize("common", ["", *(pytest.param(each, marks=slow) for each in ("--undivided", "--every"))])
def test_gradients_that_are_kept_nowhere_are_not_compared(common: str) -> None:
    result = audit(SCRIPT, FULL, ACCUMULATED, f"--style gradients {common}")
    assert (result.code, result.outcome, result.faults) == (3, "inconclusive", set()), str(result)
    assert "let `.grad` add them up until the weights move" in result.document["reason"]


@slow
def test_what_a_captured_graph_hides_is_said() -> None:
    seen = audit(SCRIPT, FULL, ACCUMULATED, "--style captured")
    assert [why.partition(",")[0] for why in seen.document["calls"]["left_out"]] == ["CUDA graph capture"], str(seen)
    hidden = audit(SCRIPT, FULL, ACCUMULATED, "--style captured --whole")
    assert hidden.code == 2 and "calls inside the capture of a CUDA graph" in hidden.err, str(hidden)


@slow
def test_calls_alone_show_the_moves() -> None:
    result = events_of(SCRIPT, "--batch-size 2 --accum 4 --style plain", options=("--steps", "4"))
    assert (result.code, result.faults) == (0, set()), str(result)
    assert {(count["backward"], count["step"]) for count in result.document["calls"]["counts"]} == {(4, 1)}


def test_gradients_that_are_only_looked_at(tmp_path: Path) -> None:
    body = TRAIN.replace("    if (i", LOOKED_AT + "    if (i")
    result = audited(tmp_path / "train.py", body)
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
    counts = [count for count in result.document["calls"]["counts"] if count["complete"]]
    assert {(count["backward"], count["step"]) for count in counts} == {(4, 1)}


UNKEPT = """
for x, y in batches * 2:
    (gradient,) = torch.autograd.grad(mse_loss(model(x), y), [model.weight])
    model.weight.data -= 0.1 * gradient
raise RuntimeError("it went on")
"""


@slow
def test_a_script_that_keeps_no_gradients_ends_after_two_updates(tmp_path: Path) -> None:
    result = audited(tmp_path / "train.py", UNKEPT)
    assert (result.code, result.outcome) == (3, "inconclusive"), str(result)


@slow
def test_a_script_that_moves_what_its_optimizer_never_steps(tmp_path: Path) -> None:
    body = TRAIN.replace("optimizer.step()", "model.weight.data -= 0.1 * model.weight.grad")
    result = audited(tmp_path / "train.py", body)
    assert (result.code, result.outcome, result.faults) == (3, "inconclusive", set()), str(result)
    assert "its `SGD` never steps" in result.document["reason"]


@slow
def test_weights_that_are_loaded_between_forwards(tmp_path: Path) -> None:
    body = "start = {n: w.clone() for n, w in model.state_dict().items()}\nmodel(inputs[:2])\n"
    body += "for _ in range(4):\n    model.load_state_dict({n: w * 1.5 for n, w in start.items()})\n"
    body += "    model(inputs[:2])\nmodel.load_state_dict(start)\n"
    result = audited(tmp_path / "train.py", body + TRAIN)
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
    assert {run["how"] for run in result.document["runs"]} == {""}


@slow
@pytest.mark.parametrize(("by", "code"), [("micro_batch", 1), ("window", 0)])
def test_gradients_that_are_projected_in_each_micro_batch(by: str, code: int) -> None:
    """Two differentiations per micro-batch: as many weights as gradients fit anything, and rule nothing out."""
    result = audit(*PROJECTING, common=f"--loop projecting --by {by}")
    assert (result.code, result.faults) == (code, set()), str(result)
    assert code == 0 or "all calls are in the right order" in result.text("GAV000")
    assert code == 0 or "the best weights" not in result.text("GAV000")
