"""Scripts without a backward pass or an optimizer of torch's: judged by what their weights are given."""

from pathlib import Path

import pytest
from audits import TRAIN, audit, audited, events_of, marked

FULL, ACCUMULATED = "--batch-size 8 --accum 1", "--batch-size 2 --accum 4"
SCRIPT = "loops_unannounced.py"
BY_HAND = ["plain", "gradients", "own"]
STYLES = [*BY_HAND, "assigned", "functional", "compiled", "captured"]
LOOKED_AT = "    norm = torch.autograd.grad(mse_loss(model(x), y), [model.weight])[0].norm().item()\n"
slow = pytest.mark.slow


@pytest.mark.parametrize("style", [pytest.param(style, marks=() if style == "plain" else slow) for style in STYLES])
def test_a_right_loop_is_equivalent(style: str) -> None:
    result = audit(SCRIPT, FULL, ACCUMULATED, f"--style {style}")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
    assert all(update["judged"] for update in result.document["updates"])
    how = {run["how"] for run in result.document["runs"]}
    assert any("compared by the change of the weights" in run for run in how) == (style == "gradients")
    assert any("its steps seen by its weights" in run for run in how) == (style in BY_HAND)
    assert any("without compilation" in run for run in how) == (style == "compiled")


@slow
@pytest.mark.parametrize("style", STYLES)
def test_a_loss_that_is_not_divided_is_found(style: str) -> None:
    result = audit(SCRIPT, FULL, ACCUMULATED, f"--style {style} --undivided")
    assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
    assert "4 times the full batch's = K" in result.finding("GAV201")["summary"]
    if style not in ("functional", "captured"):  # of these nothing is seen but what the step uses
        assert result.line("GAV201") == marked(SCRIPT, style)


@slow
@pytest.mark.parametrize("style", BY_HAND)
def test_a_move_inside_the_window_is_found(style: str) -> None:
    result = audit(SCRIPT, FULL, ACCUMULATED, f"--style {style} --every")
    assert (result.code, result.faults) == (1, {"GAV601"}), str(result)
    assert result.finding("GAV601")["proven"]


@slow
class TestOptimizersOfTheScript:
    """`.grad` is compared; most of these change the weights alike whatever its size."""

    @pytest.mark.parametrize("rule", ["adam", "signs", "lion", "norms"])
    def test_a_step_that_hides_the_gradients_size_hides_no_missing_division(self, rule: str) -> None:
        right = audit(SCRIPT, FULL, ACCUMULATED, f"--style own --rule {rule}")
        assert (right.code, right.outcome, right.faults) == (0, "equivalent", set()), str(right)
        wrong = audit(SCRIPT, FULL, ACCUMULATED, f"--style own --rule {rule} --undivided")
        assert (wrong.code, wrong.faults) == (1, {"GAV201"}), str(wrong)
        assert "4 times the full batch's = K" in wrong.finding("GAV201")["summary"]
        assert wrong.line("GAV201") == marked(SCRIPT, "own")

    @pytest.mark.parametrize(
        ("common", "said"),
        [
            ("--late step", "the step takes the factor out again"),
            ("--late edit", "4 of 4 gradients agree"),
            ("--late edit --rule adam", "4 of 4 gradients agree"),
            ("--rule adam --clip 0.5", "4 of 4 gradients agree"),
        ],
    )
    def test_dividing_later_is_right(self, common: str, said: str) -> None:
        result = audit(SCRIPT, FULL, ACCUMULATED, f"--style own {common}")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
        assert said in result.document["reason"], str(result)

    def test_clipping_hides_no_missing_division(self) -> None:
        result = audit(SCRIPT, FULL, ACCUMULATED, "--style own --rule adam --clip 0.5 --undivided")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)

    @pytest.mark.parametrize("common", ["--style own --rule adam", "--style gradients"])
    def test_samples_that_meet_are_named(self, common: str) -> None:
        result = audit(SCRIPT, FULL, ACCUMULATED, f"{common} --batch-norm")
        assert (result.code, result.faults) == (1, {"GAV101"}), str(result)
        assert result.finding("GAV101")["proven"]

    def test_a_missing_division_is_named_beside_samples_that_meet(self) -> None:
        result = audit(SCRIPT, FULL, ACCUMULATED, "--style own --batch-norm --undivided")
        assert (result.code, result.faults) == (1, {"GAV101", "GAV201"}), str(result)
        assert result.finding("GAV101")["proven"] and "4 times the full batch's = K" in result.text("GAV201")

    @pytest.mark.parametrize("common", ["", "--undivided"])
    def test_a_change_of_weights_that_shows_nothing_of_the_gradient_is_inconclusive(self, common: str) -> None:
        result = audit(SCRIPT, FULL, ACCUMULATED, f"--style gradients --rule adam {common}")
        assert (result.code, result.outcome, result.faults) == (3, "inconclusive", set()), str(result)
        assert "the script keeps no `.grad`" in result.document["reason"]

    def test_another_rate_with_the_same_gradients_is_found(self) -> None:
        result = audit(SCRIPT, FULL, ACCUMULATED, "--style own --rate-by-k")
        assert (result.code, result.faults) == (1, {"GAV609"}), str(result)


@slow
def test_what_a_captured_graph_hides_is_said() -> None:
    seen = audit(SCRIPT, FULL, ACCUMULATED, "--style captured")
    assert [why.partition(",")[0] for why in seen.document["left_out"]] == ["CUDA graph capture"], str(seen)
    hidden = audit(SCRIPT, FULL, ACCUMULATED, "--style captured --whole")
    assert hidden.code == 2 and "calls inside the capture of a CUDA graph" in hidden.err, str(hidden)


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
