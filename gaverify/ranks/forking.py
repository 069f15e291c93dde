"""Forks processes that compute and end with their parent, and brings back what they returned.

A fork starts in milliseconds and shares the model and the batch with its parent. It works where there are only CPUs:
neither CUDA nor, beside it, autograd runs in a forked process, where `fresh` takes its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gaverify.ranks.collecting import Child, Job, collected, outcome

_PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent dies


class _Forked:
    """A forked process, and the pipe that it writes to."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid, self._pipe = pid, pipe
        self._status: int | None = None

    def wait(self) -> int:
        """Waits until it has ended."""
        _, self._status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(self._status)

    def end(self) -> None:
        """Kills it."""
        with contextlib.suppress(OSError):
            os.close(self._pipe)
        if self._status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            self.wait()


def run_forked(
    jobs: Sequence[Job], timeout: float | None = None, waiting: Callable[[], None] = lambda: None
) -> list[Any]:
    """Runs each job in a forked process, all at the same time, and returns their results in order.

    Args:
        jobs: What to run.
        timeout: Seconds after which all are ended; None waits for ever.
        waiting: Called every few hundredths of a second.

    Raises:
        GaverifyError: As `collected` raises it. All processes are ended first.
    """
    return collected((_fork(name, call) for name, call in jobs), timeout, waiting)


def _fork(name: str, call: Callable[[], Any]) -> Child:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(name, reading, _Forked(pid, reading))
    code = 1
    try:
        os.close(reading)
        _settle(parent)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(outcome(call), pipe)
        code = 0
    finally:
        os._exit(code)  # the parent's `finally` blocks and exit handlers are not this process's to run
    raise AssertionError("unreachable")


def _settle(parent: int) -> None:
    """Makes the fork end with its parent, gives it streams of its own, and one thread to compute with."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before it was asked for
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background of a script, or under nohup
            signal.signal(number, signal.SIG_DFL)
    # a thread of the parent, such as a progress bar's, may hold the lock of its stream at the fork, for ever here
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    import torch

    torch.set_num_threads(1)  # the threads of the parent's pool were not forked; waiting for them would never end
