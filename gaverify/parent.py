"""The process that says how `gaverify run` ended where a signal ended it: a crashed kernel, SIGTERM, no memory.

A process that a kernel crashes can say nothing any more, and one that hangs in a kernel answers no signal. So the
command forks once, before anything large is imported: the child verifies, the parent waits, and passes signals on. It
imports nothing of gaverify's but how a launcher is known. Where the system lacks `sigwaitinfo` nothing is forked.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from gaverify.launched import read_launcher

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
