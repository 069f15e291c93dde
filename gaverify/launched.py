"""This process among others: what a launcher says about it, and the parent that says how a signal ended it."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

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
        code: What this rank will leave with; one that leaves with 0 ends nobody.
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


# The process that says how `gaverify run` ended where a signal ended it: a crashed kernel, SIGTERM, no memory.
#
# A process that a kernel crashes can say nothing any more, and one that hangs in a kernel answers no signal. So the
# command forks once, before anything large is imported: the child verifies, the parent waits, and passes signals
# on. It imports nothing of gaverify's but how a launcher is known. Where the system lacks `sigwaitinfo` nothing is
# forked.


_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (\S+)', re.MULTILINE)
_STACK_BYTES = 1 << 16
_USER_CODE_FAILED = 2
_SET_PDEATHSIG = 1  # prctl(2)


def fork_under_watch(words: list[str]) -> None:
    """Returns in a child that is watched; the parent leaves with the child's exit code and never returns.

    Args:
        words: Those of the command line; nothing is forked but for `run`, and not for a launcher, which watches itself.
    """
    wanted = words[:1] == ["run"] and not {"-h", "--help"} & set(words)
    if not wanted or not hasattr(signal, "sigwaitinfo") or read_launcher() is not None:
        return
    watched = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)  # none may be lost between the fork and the wait
    reading, writing = os.pipe()
    parent = os.getpid()
    child = -1
    try:
        child = os.fork()
    except OSError:  # no room for another process: without its sentence, then
        return
    finally:
        if child <= 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if child == 0:
        os.close(reading)
        _end_with(parent)
        # Python's stack at a crash goes to the parent, which names the user's line in it
        faulthandler.enable(writing, all_threads=False)
        return
    os.close(writing)
    _leave_as(_wait_for(child, watched), reading)


def _end_with(parent: int) -> None:
    """Ends this process when its parent is killed."""
    if sys.platform == "linux":
        import ctypes  # as torch will

        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was killed before this
            os._exit(128 + signal.SIGKILL)


def _wait_for(child: int, watched: set[signal.Signals]) -> int:
    """Passes signals on until the child has ended; returns how, as `os.waitstatus_to_exitcode` does."""
    while True:
        info = signal.sigwaitinfo(watched)
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        elif info.si_code <= 0:  # from a process; Ctrl-C comes from the terminal, which sends it to the child, too
            os.kill(child, info.si_signo)


def _leave_as(code: int, stack: int) -> NoReturn:
    """Ends this process as the child ended, with a sentence where a signal ended it."""
    if code == -signal.SIGINT:  # behind its answer
        os._exit(128 + signal.SIGINT)
    if code < 0:
        code, sentence = _told(signal.Signals(-code), stack)
        with suppress(OSError):  # nobody reads it
            print(f"gaverify: error: {sentence}", file=sys.stderr, flush=True)
    os._exit(code)


def _told(number: signal.Signals, stack: int) -> tuple[int, str]:
    """The exit code and the sentence for a child that a signal ended."""
    if number in _CRASHES:
        crash = f"{signal.strsignal(number)} ({number.name}){_place_of_crash(stack)}"
        advice = "try `--device cpu`, a smaller `--batch-size`, or the model without that kernel"
        return _USER_CODE_FAILED, f"a compiled kernel crashed the process: {crash}; {advice}"
    why = " (out of memory?); try a smaller `--batch-size`" if number is signal.SIGKILL else "; run it again"
    return 128 + number, f"{number.name} ended the process before it was done{why}"


def _place_of_crash(stack: int) -> str:
    """The innermost line of the user's code on Python's stack; "" where there is none."""
    os.set_blocking(stack, False)  # a process that the model has started may still hold the other end
    try:
        text = os.read(stack, _STACK_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    machinery = (os.path.dirname(os.path.abspath(__file__)) + os.sep, "<")
    for file, line, function in _FRAME.findall(text):
        if not file.startswith(machinery) and "site-packages" not in file and not file.startswith(sys.base_prefix):
            near = os.path.relpath(file)
            return f" in `{function}` ({file if near.startswith('..') else near}:{line})"
    return ""
