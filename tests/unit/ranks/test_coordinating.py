"""The process between the user's and the ranks: what a signal leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WAITS = """
import signal, sys, tempfile, time
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from gaverify.ranks.coordinating import coordinated
def work(progress):
    folder = tempfile.mkdtemp()
    print("ready", flush=True)
    time.sleep({seconds})
    return folder
coordinated(work, None)
"""


def waiting(folder: Path, seconds: float, *ignored: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(seconds=seconds), *ignored],
        env={**os.environ, "TMPDIR": str(folder)},
        text=True,
        stderr=subprocess.PIPE,  # where a forked process's output goes
        start_new_session=True,
    )
    assert process.stderr is not None
    while "ready" not in process.stderr.readline():
        assert process.poll() is None
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("number", "everybody"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_leaves_no_folder(number: int, everybody: bool, tmp_path: Path) -> None:
    """A terminal sends it to all processes, `kill` to one."""
    process = waiting(tmp_path, 60)
    begun = time.monotonic()
    os.killpg(process.pid, number) if everybody else process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0 and time.monotonic() - begun < 30
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_the_caller_ignores_ends_no_rank(tmp_path: Path) -> None:
    process = waiting(tmp_path, 0.5, "SIGINT", "SIGHUP")
    for number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == 0 and list(tmp_path.iterdir()) == []
