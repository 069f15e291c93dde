"""Faulty scripts get a patch that was tried and changes only the lines of the fault; right ones get none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaverify.audit.flow import Comparer, PatchTrials, audit
from gaverify.audit.request import Request
from gaverify.audit.running import Runner
from gaverify.patches.searching import TrialResult
from gaverify.records.audit_report import Audit
from gaverify.records.outcomes import Outcome

SCRIPT = """import argparse
import torch
from torch.nn.functional import mse_loss

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument('--accum', type=int, default=1)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
inputs = torch.randn(64, 4)
targets = inputs.sum(1, keepdim=True)
loader = list(zip(inputs.split(args.batch_size), targets.split(args.batch_size)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(loader):
    loss = mse_loss(model(x), y) / args.accum  # the mean
    loss.backward()
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
RUNS = {"full": ("--batch-size", "8"), "accumulated": ("--batch-size", "2", "--accum", "4")}


def audited(folder: Path, *changes: tuple[str, str], unsafe: bool = False) -> Audit:
    """Audits the script with pieces of its text replaced."""
    text = SCRIPT
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    report = audit(Request(script=str(script), **RUNS), patches="unsafe" if unsafe else "safe")
    assert script.read_text(encoding="utf-8") == text  # no trial touches the user's file
    return report


def changed_lines(report: Audit) -> list[str]:
    """The lines that a patch takes away and puts in."""
    assert report.patch is not None, report.patch_refused
    lines = report.patch.diff.splitlines()
    return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def test_loss_is_divided_where_it_is_differentiated(tmp_path: Path) -> None:
    report = audited(tmp_path, (" / args.accum", ""))
    assert report.outcome is Outcome.DIVERGENT
    assert changed_lines(report) == ["-    loss.backward()", "+    (loss / args.accum).backward()"]
    assert report.patch is not None and report.patch.codes == ("GAV201",) and not report.patch.unsafe


@pytest.mark.parametrize(
    ("changes", "code", "lines"),
    [
        pytest.param(
            [("(i + 1) %", "i %")],
            "GAV601",
            ["-    if i % args.accum == 0:", "+    if (i + 1) % args.accum == 0:"],
            id="boundary",
        ),
        pytest.param(
            [("        optimizer.zero_grad()\n", ""), ("    loss =", "    optimizer.zero_grad()\n    loss =")],
            "GAV603",
            ["-    optimizer.zero_grad()", "+        optimizer.zero_grad()"],
            id="cleared",
        ),
        pytest.param(
            [("        optimizer.zero_grad()\n", "")],
            "GAV602",
            ["+        optimizer.zero_grad()"],
            id="not cleared",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [("loss.backward()", "(loss / args.accum).backward()")],
            "GAV201",
            [
                "-    loss = mse_loss(model(x), y) / args.accum  # the mean",
                "+    loss = mse_loss(model(x), y)  # the mean",
            ],
            id="divided twice",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_calls_at_the_wrong_place(tmp_path: Path, changes: list[tuple[str, str]], code: str, lines: list[str]) -> None:
    report = audited(tmp_path, *changes)
    assert changed_lines(report) == lines
    assert report.patch is not None and report.patch.codes == (code,)


def test_right_script_gets_no_patch(tmp_path: Path) -> None:
    report = audited(tmp_path)
    assert report.outcome is Outcome.EQUIVALENT
    assert report.patch is None and report.patch_refused == ""


def test_trial_measures_the_full_batch_of_patched_sources(tmp_path: Path) -> None:
    script, undivided = tmp_path / "train.py", SCRIPT.replace(" / args.accum", "")
    script.write_text(undivided, encoding="utf-8")
    request = Request(script=str(script), **RUNS)
    runner = Runner(request, tmp_path, lambda *_: None)
    trials = PatchTrials(runner, Comparer(request, runner).compare(), updates=2)

    def trial(scaled: str) -> TrialResult:
        return trials({str(script): undivided.replace("loss.backward()", f"({scaled}).backward()")}, safe=True)

    half, zero = trial("loss / args.accum / 2"), trial("0 * loss")
    assert half.is_equivalent and half.factor == pytest.approx(0.5)
    assert not zero.is_equivalent


@pytest.mark.slow
@pytest.mark.parametrize("started", ["module", "launcher"])
def test_patch_reaches_imported_modules_and_launched_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    loop = SCRIPT.replace(" / args.accum", "")
    (package / "loop.py").write_text(loop, encoding="utf-8")
    (package / "train.py").write_text("import package.loop\n", encoding="utf-8")
    (tmp_path / "train.py").write_text("import package.loop\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    request = Request(module="package.train", **RUNS)
    if started == "launcher":
        request = Request(script="train.py", launcher=("python",), **RUNS)
    report = audit(request, patches="safe")
    assert changed_lines(report) == ["-    loss.backward()", "+    (loss / args.accum).backward()"]
    assert report.patch is not None and [edit.file for edit in report.patch.edits] == [str(package / "loop.py")]
    assert report.patch.diff.startswith("--- a/package/loop.py")
    assert (package / "loop.py").read_text(encoding="utf-8") == loop


def test_script_in_a_folder_that_runs_share_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # which all runs see as it is
    report = audited(tmp_path, (" / args.accum", ""))
    assert report.outcome is Outcome.DIVERGENT and report.patch is None
    assert "did not make the runs equivalent" in report.patch_refused
