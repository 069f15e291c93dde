"""Memory of the runs of an audit: what a process has had, and whether two runs are made side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gaverify.audit import running
from gaverify.audit.memory import fit_side_by_side, peak_memory
from gaverify.audit.reading import RecordedRun
from gaverify.audit.request import Request
from gaverify.audit.running import Runner
from gaverify.records.events import PeakMemory


def test_a_process_knows_the_most_memory_that_it_had() -> None:
    before = peak_memory().host
    if not before:
        pytest.skip("the system does not tell")
    held = b"x" * before
    assert peak_memory().host >= len(held) + before * 0.5


@pytest.mark.parametrize(
    ("peak", "fits"),
    [
        (PeakMemory(), True),  # not known
        (PeakMemory(1 << 20), True),
        (PeakMemory(1 << 60), False),
        (PeakMemory(1 << 20, 40, 80), True),
        (PeakMemory(1 << 20, 41, 80), False),
    ],
)
def test_two_runs_fit_where_memory_and_device_have_room(peak: PeakMemory, fits: bool) -> None:
    if peak.host == 1 << 60 and not peak_memory().host:
        pytest.skip("the system does not tell")
    assert fit_side_by_side(peak, 1) is fits


@pytest.mark.parametrize(("fits", "calls"), [(True, [2]), (False, [1, 1])])
def test_runs_that_do_not_fit_are_made_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool, calls: list[int]
) -> None:
    made: list[int] = []

    def run_jobs(jobs: list[Any], timeout: float, tell: Any) -> list[Any]:
        made.append(len(jobs))
        return []

    monkeypatch.setattr(running, "run_jobs", run_jobs)
    runner = Runner(Request(script="train.py"), tmp_path, lambda *_: None)
    runner._fits_twice = fits
    plan = runner.plan("full")
    runner.record(plan, plan)
    assert made == calls


@pytest.mark.parametrize("reuse_records", [False, True])
def test_copied_gradients_go_when_no_run_follows_them(tmp_path: Path, reuse_records: bool) -> None:
    """Not those of a folder that is only read: records that are kept stay as they are."""
    full = RecordedRun("full", tmp_path / "0-full", 1.0)
    full.folder.mkdir()
    for name in ("copy-0-1.pt", "gradients-0-1.pt"):
        (full.folder / name).touch()
    Runner(Request(script="train.py"), tmp_path, lambda *_: None, reuse_records).drop_copies(full)
    assert (full.folder / "copy-0-1.pt").exists() is reuse_records and (full.folder / "gradients-0-1.pt").exists()
