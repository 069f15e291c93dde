"""Scripts that train below float32, right and with a fault: no moved weights could tell the one from the other."""

from __future__ import annotations

import pytest
from audits import audit, marked

pytestmark = pytest.mark.slow
SCRIPT = "train_low_precision.py"


@pytest.mark.parametrize("clip", ["", "--clip 0.1"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16", "autocast"])
def test_the_right_loop_is_equivalent(precision: str, clip: str) -> None:
    result = audit(SCRIPT, common=f"--precision {precision} {clip}")
    assert (result.code, result.faults) == (0, set()), str(result)
    assert result.update(1)["relative_difference"] < 0.01
    assert result.document["method"] == "weights"


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_a_mean_of_means_is_named_with_its_shares(precision: str) -> None:
    result = audit(SCRIPT, common=f"--precision {precision} --fault means --clip 0.1")
    assert (result.code, result.faults) == (1, {"GAV202"}), str(result)
    assert result.line("GAV202") == marked(SCRIPT, "low")
    assert result.finding("GAV202")["remedy"].startswith("sum the losses and divide by what the whole window counts")
