"""This process among others: what a launcher says about it."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

leave = os._exit
"""Ends the process; `guard_process` keeps the user's code from it, so that it is noted before that runs."""
_PATIENCE = 10.0  # seconds that a rank waits for the first one's report
_first: list[int] = []  # its process, where that is on this machine
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_launcher() -> tuple[int, int] | None:
    """Returns the rank and the number of ranks that torchrun, `accelerate launch` and the like have set; None alone."""
    words = [os.environ.get(name, "") for name in _NEEDED]
    if not all(words) or not (words[0].isdecimal() and words[1].isdecimal()):
        return None
    rank, count = int(words[0]), int(words[1])
    return (rank, count) if count > 1 else None


def is_first() -> bool:
    """Whether this process is the one that reports: rank 0, or one that nothing launched."""
    launch = read_launcher()
    return launch is None or launch[0] == 0


def this_process() -> str:
    """Returns the machine and the number of this process, for `note_first` of the other ranks."""
    return f"{socket.gethostname()} {os.getpid()}"


def note_first(process: str) -> None:
    """Notes which process is the first rank, as `this_process` says it there."""
    host, _, number = process.rpartition(" ")
    _first[:] = [int(number)] if host == socket.gethostname() else []


def await_first(code: int) -> None:
    """Waits until the first rank has reported: launchers end all ranks as soon as one has failed.

    Args:
        code: The code that this rank will leave with; one that leaves with 0 ends nobody.
    """
    if not code or is_first() or not _first:
        return
    with suppress(ValueError):  # outside the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this rank ends by itself, with its own code
    limit = time.monotonic() + _PATIENCE
    while time.monotonic() < limit and _runs(_first[0]):
        time.sleep(0.05)


def _runs(process: int) -> bool:
    """Whether a process has not ended; one that has, and that nobody has asked for its exit code, does not run."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    if Path("/proc/self").exists():
        return False
    with suppress(OSError):
        os.kill(process, 0)
        return True
    return False
