"""The process between gaverify and a child; a script of its own, which imports nothing of gaverify's.

    python -I -S keeper.py WATCHED COMMAND...

It starts COMMAND and waits for one of two things: that the child ends, or that nobody holds the other end of the pipe
WATCHED any more, because gaverify closed it or is gone. Then it ends the rest of the child's process group. On Linux
orphans come to it, and it ends everything else that the child started. It leaves as the child did. Where a child
is forked from gaverify, `keep` runs in a fork as well.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

_GRACE = 1.0  # seconds that workers get to clean up between SIGTERM and SIGKILL
_TICK = 0.02
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


class Fork:
    """A forked process, by the names of `subprocess.Popen`."""

    def __init__(self, number: int) -> None:
        self.pid = number
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns how it ended; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Waits until it has ended, and returns how.

        Raises:
            subprocess.TimeoutExpired: It runs on.
        """
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(_TICK)
        return code

    def kill(self) -> None:
        """Ends it."""
        os.kill(self.pid, signal.SIGKILL)


def main(words: list[str]) -> None:
    """Keeps the child that a command starts."""
    watched, command = int(words[0]), words[1:]
    keep(watched, lambda: subprocess.Popen(command, start_new_session=True, preexec_fn=prepare_child))


def keep(watched: int, start: Callable[[], subprocess.Popen[bytes] | Fork]) -> None:
    """Keeps the child that `start` starts until it ends or gaverify does, and ends this process then."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # gaverify decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    child = start()
    for stream in (0, 1, 2):  # a reader of the child's output waits for its end, and must not wait for ours
        os.close(stream)
    while child.poll() is None:
        ready, _, _ = select.select([watched, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
        if watched in ready:  # nothing is ever written: the other end is closed
            break
    _end(child)
    code = child.poll()
    _leave(-signal.SIGKILL if code is None else code)


def prepare_child() -> None:
    """In the child, before its program starts: signals as they were, and a second guard should the keeper be killed."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end(child: subprocess.Popen[bytes] | Fork) -> None:
    """Ends the child and everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        waited = time.monotonic() + _GRACE
        while _group_lives(child) and time.monotonic() < waited:
            time.sleep(_TICK)
    for _ in range(100):  # who left the group became ours when their parents ended
        strangers = _children()
        if not strangers:
            return
        for stranger in strangers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(stranger, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(stranger, 0)


def _group_lives(child: subprocess.Popen[bytes] | Fork) -> bool:
    child.poll()
    for stranger in _children():  # an orphan that ended stays in the group until it is waited for
        if stranger != child.pid:
            with suppress(ChildProcessError):
                os.waitpid(stranger, os.WNOHANG)
    try:
        os.killpg(child.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as stream:
            return [int(word) for word in stream.read().split()]
    except OSError:
        return []


def _leave(status: int) -> None:
    """Ends this process as the child ended."""
    if status >= 0:
        os._exit(status)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    os._exit(128 - status)


if __name__ == "__main__":
    main(sys.argv[1:])
