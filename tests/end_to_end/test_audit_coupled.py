"""Samples that act on each other in a script: the operation or the loss is named and proven, right loops stay quiet."""

import pytest
from audits import audit, marked

FULL, ACCUMULATED = "--batch-size 16 --accum 1", "--batch-size 4 --accum 4"
SCRIPT = "loops_coupled.py"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("loop", "code", "line"),
    [
        ("compared", "GAV103", "contrastive"),
        ("scored", "GAV103", "contrastive"),
        ("advantages", "GAV103", "advantages"),
        ("attention", "GAV102", "attention"),
        ("chained", "GAV101", "chained"),
        ("criterion", "GAV103", "made"),
        ("against_reference", "GAV103", "against_reference"),
    ],
)
def test_where_samples_meet_is_named_and_proven(loop: str, code: str, line: str) -> None:
    result = audit(SCRIPT, FULL, ACCUMULATED, f"--loop {loop}")
    assert (result.code, result.faults) == (1, {code}), str(result)
    found = result.finding(code)
    assert found["proven"] and result.line(code) == marked(SCRIPT, line), str(result)
    if code == "GAV103":
        assert "cached gradient" in found["remedy"] and "tested" in found["remedy"]
