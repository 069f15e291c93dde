"""The process between gaverify and a child; a script of its own, which imports nothing of gaverify's.

    python -I -S keeper.py WATCHED COMMAND...

It starts COMMAND and waits for one of two things: that the child ends, or that nobody holds the other end of the pipe
WATCHED any more, because gaverify closed it or is gone. Then it ends what is left of the child's process group and
(on Linux, where orphans come to it) everything else that the child started, and leaves as the child did.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

_GRACE = 1.0  # seconds that workers get to clean up between SIGTERM and SIGKILL
_TICK = 0.02
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


def main(words: list[str]) -> None:
    """Keeps the child until it ends or gaverify does."""
    watched, command = int(words[0]), words[1:]
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # gaverify decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_prepare_child)
    for stream in (0, 1, 2):  # a reader of the child's output waits for its end, and must not wait for ours
        os.close(stream)
    while child.poll() is None:
        ready, _, _ = select.select([watched, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
        if watched in ready:  # nothing is ever written: the other end is closed
            break
    _end(child)
    _leave(child.returncode)


def _prepare_child() -> None:
    """In the child, before its program starts: signals as they were, and a second guard should the keeper be killed."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent()


def end_with_parent() -> None:
    """Has the system end this process when its parent is killed."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end(child: subprocess.Popen[bytes]) -> None:
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


def _group_lives(child: subprocess.Popen[bytes]) -> bool:
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
