"""Scripts without a backward pass or an optimizer of torch's: judged by what their weights are given."""

from pathlib import Path

import pytest
from audits import TRAIN, audit, audited, events_of, marked

FULL, ACCUMULATED = "--batch-size 8 --accum 1", "--batch-size 2 --accum 4"
SCRIPT = "loops_unannounced.py"
BY_HAND = ["plain", "gradients", "own"]
STYLES = [*BY_HAND, "assigned", "functional", "compiled"]
LOOKED_AT = "    norm = torch.autograd.grad(mse_loss(model(x), y), [model.weight])[0].norm().item()\n"
slow = pytest.mark.slow


@pytest.mark.parametrize("style", [pytest.param(style, marks=() if style == "plain" else slow) for style in STYLES])
def test_a_right_loop_is_equivalent(style: str) -> None:
    result = audit(SCRIPT, FULL, ACCUMULATED, f"--style {style}")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
    assert all(update["judged"] for update in result.document["updates"])
    how = {run["how"] for run in result.document["runs"]}
    assert ("by the change of the weights" in how) == (style in BY_HAND)
    assert ("without compilation" in how) == (style == "compiled")


@slow
@pytest.mark.parametrize("style", STYLES)
def test_a_loss_that_is_not_divided_is_found(style: str) -> None:
    result = audit(SCRIPT, FULL, ACCUMULATED, f"--style {style} --undivided")
    assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
    assert "4 times the full batch's = K" in result.finding("GAV201")["summary"]
    if style != "functional":  # of `torch.func` nothing is seen but what the step uses
        assert result.line("GAV201") == marked(SCRIPT, style)


@slow
@pytest.mark.parametrize("style", BY_HAND)
def test_a_move_inside_the_window_is_found(style: str) -> None:
    result = audit(SCRIPT, FULL, ACCUMULATED, f"--style {style} --every")
    assert (result.code, result.faults) == (1, {"GAV601"}), str(result)
    assert result.finding("GAV601")["proven"]


@slow
def test_calls_alone_show_the_moves() -> None:
    result = events_of(SCRIPT, "--batch-size 2 --accum 4 --style plain", options=("--steps", "4"))
    assert (result.code, result.faults) == (3, set()), str(result)
    assert {(count["backward"], count["step"]) for count in result.document["counts"]} == {(4, 1)}


class TestWhatIsNoStep:
    """Quiet twins: weights that move, and gradients that are only looked at."""

    def test_gradients_that_are_only_looked_at(self, tmp_path: Path) -> None:
        body = TRAIN.replace("    if (i", LOOKED_AT + "    if (i")
        result = audited(tmp_path / "train.py", body)
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
        counts = [count for count in result.document["counts"] if count["complete"]]
        assert {(count["backward"], count["step"]) for count in counts} == {(4, 1)}

    @slow
    def test_weights_that_are_loaded_between_forwards(self, tmp_path: Path) -> None:
        body = "start = {n: w.clone() for n, w in model.state_dict().items()}\nmodel(inputs[:2])\n"
        body += "for _ in range(4):\n    model.load_state_dict({n: w * 1.5 for n, w in start.items()})\n"
        body += "    model(inputs[:2])\nmodel.load_state_dict(start)\n"
        result = audited(tmp_path / "train.py", body + TRAIN)
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
        assert {run["how"] for run in result.document["runs"]} == {""}
