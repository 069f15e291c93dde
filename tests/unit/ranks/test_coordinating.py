"""The process between the user's and the ranks: what a signal leaves behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import gaverify

WAITS = """
import sys, tempfile, time
def work(progress):
    folder = tempfile.mkdtemp()
    print("ready", flush=True)
    time.sleep({seconds})
    return folder
"""
STARTS = """
import signal, sys, torch, waits
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from gaverify.ranks.coordinating import coordinated
coordinated(waits.work, None, {device})
"""


def waiting(folder: Path, seconds: float, *ignored: str, device: str = "None") -> subprocess.Popen[str]:
    place = folder.with_name("code")
    place.mkdir()
    (place / "waits.py").write_text(WAITS.format(seconds=seconds), encoding="utf-8")
    paths = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS.format(device=device), *ignored],
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": paths},
        text=True,
        stderr=subprocess.PIPE,  # where a forked process's output goes
        start_new_session=True,
    )
    assert process.stderr is not None
    while "ready" not in process.stderr.readline():
        assert process.poll() is None
    return process


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "everybody", "device"),
    [(signal.SIGINT, True, "None"), (signal.SIGTERM, False, "None"), (signal.SIGTERM, False, "torch.device('cpu')")],
    ids=["terminal", "kill", "fresh"],
)
def test_a_signal_leaves_no_folder(number: int, everybody: bool, device: str, folder: Path) -> None:
    """A terminal sends it to all processes, `kill` to one. What goes on would hold the stream that is waited for."""
    process = waiting(folder, 60, device=device)
    begun = time.monotonic()
    os.killpg(process.pid, number) if everybody else process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0 and time.monotonic() - begun < 30
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_what_the_caller_ignores_ends_no_rank(folder: Path) -> None:
    process = waiting(folder, 0.5, "SIGINT", "SIGHUP")
    for number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == 0 and list(folder.iterdir()) == []


def test_no_engine_outlives_the_group_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that dies after its rank has left the group waits for the group's threads, sometimes for ever."""
    leave = torch.distributed.destroy_process_group

    def left() -> None:
        kept = [held for held in gc.get_objects() if isinstance(held, nn.parallel.DistributedDataParallel)]
        assert not kept
        leave()

    monkeypatch.setattr(torch.distributed, "destroy_process_group", left)
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    verdict = gaverify.verify(nn.Linear(4, 3), nn.CrossEntropyLoss(), batch, steps=2, ranks=2)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT
