"""Clipping, and what else changes gradients between the last backward pass and the step: it hides no wrong scale."""

from __future__ import annotations

import pytest
from audits import audit, marked

SCRIPT = "loops_clipping.py"
slow = pytest.mark.slow


CASES = [
    pytest.param("--clip 0.1", (True, True), id="active in both"),
    pytest.param("--clip 1", (False, True), id="active in one", marks=slow),
    pytest.param("--clip 100", (False, False), id="inactive", marks=slow),
    pytest.param("--change by_value --clip 0.02", (True, True), id="by value", marks=slow),
    pytest.param("--aliases --clip 0.1", (True, True), id="kernels that write past lazy clones", marks=slow),
]


class TestClipping:
    """S01: whichever run is clipped, the sum before it is judged; the twin divides and stays quiet."""

    @pytest.mark.parametrize(("common", "active"), CASES)
    def test_a_forgotten_division_is_found_before_the_clip(self, common: str, active: tuple[bool, bool]) -> None:
        result = audit(SCRIPT, common=f"{common} --undivided")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
        assert result.finding("GAV201")["summary"].startswith("the gradient of update 1 is 4 times"), str(result)
        assert result.line("GAV201") == marked(SCRIPT, "loss")
        update = result.update(1)
        assert [side[0]["active"] for side in (update["clips_full"], update["clips"])] == list(active)

    @pytest.mark.parametrize(("common", "active"), CASES)
    def test_the_divided_twin_stays_quiet(self, common: str, active: tuple[bool, bool]) -> None:
        result = audit(SCRIPT, common=common)
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)

    @slow
    def test_no_clip_at_all(self) -> None:
        result = audit(SCRIPT, common="--change nothing --undivided")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
        assert result.update(1)["clips"] == []

    @slow
    @pytest.mark.parametrize(("ignored", "codes"), [(0, {"GAV606"}), (3, {"GAV606", "GAV202"})])
    def test_clipping_inside_hides_no_mean_of_means(self, ignored: int, codes: set[str]) -> None:
        common = f"--loop clip_per_micro_batch --clip 0.05 --ignored {ignored}"
        result = audit("loops_extras.py", common=common)
        assert (result.code, result.faults) == (1, codes) and result.finding("GAV606")["proven"], str(result)
        assert "with losses too small to be clipped" in result.text("GAV606")

    @pytest.mark.parametrize("clip", ["0.1", pytest.param("1", marks=slow)], ids=["in both", "in one"])
    def test_clipping_by_hand_hides_no_factor(self, clip: str) -> None:
        """A control with losses too small to be clipped tells dividing from clipping."""
        result = audit(SCRIPT, common=f"--change by_hand --clip {clip} --undivided")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
        assert result.finding("GAV201")["summary"].startswith("the gradient of update 1 is 4 times"), str(result)
        assert result.update(1)["decided"] == "unclipped"
