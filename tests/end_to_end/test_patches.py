"""A patch is tried on copies of all sources that the processes of a run import, and no file is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from audits import HEAD

from gaverify.audit.flow import Comparer, PatchTrials, audit
from gaverify.audit.request import Request
from gaverify.audit.running import Runner
from gaverify.patches.searching import TrialResult
from gaverify.records.outcomes import Outcome

UNDIVIDED = f"""{HEAD}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(batches):
    loss = mse_loss(model(x), y)
    loss.backward()
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
RUNS = {"full": ("--batch-size", "8"), "accumulated": ("--batch-size", "2", "--accum", "4")}


def test_trial_measures_the_full_batch_of_patched_sources(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNDIVIDED, encoding="utf-8")
    request = Request(script=str(script), **RUNS)
    runner = Runner(request, tmp_path, lambda *_: None)
    trials = PatchTrials(runner, Comparer(request, runner).compare(), updates=2)

    def trial(scaled: str) -> TrialResult:
        return trials({str(script): UNDIVIDED.replace("loss.backward()", f"({scaled}).backward()")}, safe=True)

    half, zero = trial("loss / args.accum / 2"), trial("0 * loss")
    assert half.is_equivalent and half.factor == pytest.approx(0.5)
    assert not zero.is_equivalent


@pytest.mark.slow
def test_patch_reaches_imported_modules_of_launched_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    loop = tmp_path / "package" / "loop.py"
    loop.write_text(UNDIVIDED, encoding="utf-8")
    (tmp_path / "train.py").write_text("import package.loop\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    report = audit(Request(script="train.py", launcher=("python",), **RUNS), patches="safe")
    assert report.patch is not None and [edit.file for edit in report.patch.edits] == [str(loop)]
    assert report.patch.diff.startswith("--- a/package/loop.py")
    assert "\n-    loss.backward()\n+    (loss / args.accum).backward()\n" in report.patch.diff
    assert loop.read_text(encoding="utf-8") == UNDIVIDED


def test_script_in_a_folder_that_runs_share_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # which all runs see as it is
    script = tmp_path / "train.py"
    script.write_text(UNDIVIDED, encoding="utf-8")
    report = audit(Request(script=str(script), **RUNS), patches="safe")
    assert report.outcome is Outcome.DIVERGENT and report.patch is None
    assert "did not make the runs equivalent" in report.patch_refused
    assert script.read_text(encoding="utf-8") == UNDIVIDED
