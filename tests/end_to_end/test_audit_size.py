"""Audits of large models: small faults beside large weights, and what stays on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from audits import audit

from gaverify.audit.request import Request
from gaverify.audit.running import Runner, Trial
from gaverify.records.outcomes import Outcome
from gaverify.thresholds import SKETCH_WIDTHS

SCRIPT = "tests/scripts/large_weight.py"
WEIGHT = 4 * 10_000_000  # bytes


@pytest.mark.parametrize("fault", [0.0, 1e-4])
def test_a_small_fault_in_a_bias_beside_a_weight_of_ten_million_is_seen(tmp_path: Path, fault: float) -> None:
    request = Request(
        script=SCRIPT,
        full=("--batch-size", "8"),
        accumulated=("--batch-size", "2", "--accum", "4", "--fault", str(fault)),
        updates=1,
    )
    runner = Runner(request, tmp_path, lambda *_: None)
    full, changes = runner.make_first("full")
    trial = Trial(runner, full, changes)
    (update,) = trial.compare()
    rows = {row.name: row for row in update.parameters}
    assert rows["wide.weight"].outcome is Outcome.EQUIVALENT and rows["wide.weight"].shape == (4000, 2500)
    assert rows["bias"].outcome is (Outcome.DIVERGENT if fault else Outcome.EQUIVALENT)
    assert not fault or rows["bias"].difference_norm == pytest.approx(fault * rows["bias"].reference_norm, rel=0.01)
    assert rows["wide.weight"].worst is None and (not fault or rows["bias"].worst)
    # No copy of the gradients is kept for a single update.
    assert sum(path.stat().st_size for path in full.folder.rglob("gradients-*")) < 2 * 8 * SKETCH_WIDTHS[0]
    assert full.disk_bytes < WEIGHT / 20


@pytest.mark.slow
@pytest.mark.parametrize(("divide", "code"), [(1, 0), (0, 1)])
def test_of_large_gradients_one_copy_is_kept_until_the_audit_ends(tmp_path: Path, divide: int, code: int) -> None:
    options = "--updates", "3", "--keep", str(tmp_path / "kept")
    accumulated = f"--batch-size 2 --accum 4 --divide {divide}"
    result = audit("large_weight.py", "--batch-size 8", accumulated, options=options)
    assert result.code == code and [update["judged"] for update in result.document["updates"]] == [True, True]
    assert "only updates 1 and 2 were compared: others would need more than one copy" in str(result)
    sizes = [path.stat().st_size for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert not [*(tmp_path / "kept").rglob("copy-*")] and sum(sizes) < WEIGHT
