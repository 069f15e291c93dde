"""Forks processes that compute and end with their parent, and brings back what they returned.

A fork starts in milliseconds and shares the model and the batch with its parent; fresh processes would import torch and
build the model again (10 to 17 s, measured). It works on CPUs only: CUDA refuses to run in a forked process.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gaverify.errors import GaverifyError, InternalError, ProblemError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent dies
_POLL = 0.05
_LINGER = 0.5  # seconds: when one rank fails the others lose their connections, and may tell of that first
_KEPT_LINES = 12  # of a traceback that a message shows


@dataclass
class _Child:
    name: str
    pid: int
    pipe: int
    received: bytearray
    status: int | None = None


@dataclass(frozen=True)
class _Failure:
    """When a task failed (the clock of all processes is one), and with what."""

    at: float
    error: GaverifyError


def run_forked(
    tasks: Sequence[tuple[str, Callable[[], Any]]],
    timeout: float | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Runs each task in a forked process, all at the same time, and returns their results in order.

    Args:
        tasks: A name for messages, and what to call; its result must be picklable.
        timeout: Seconds after which all are ended; None waits for ever.
        waiting: Called every few hundredths of a second.

    Raises:
        GaverifyError: What the first task that failed raised, if it was one of gaverify's own errors.
        InternalError: A task raised something else. All others are ended first.
        ProblemError: A task died, or was not done in time.
    """
    children: list[_Child] = []
    try:
        for name, task in tasks:
            children.append(_fork(name, task))
        return _gathered(children, timeout, waiting)
    finally:
        for child in children:
            _end(child)


def _fork(name: str, task: Callable[[], Any]) -> _Child:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        os.set_blocking(reading, False)
        return _Child(name, pid, reading, bytearray())
    code = 1
    try:
        os.close(reading)
        _settle(parent)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(_outcome(task), pipe)
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


def _outcome(task: Callable[[], Any]) -> tuple[bool, Any]:
    """What goes through the pipe: (True, result), or (False, (time, class of the error, message))."""
    try:
        return True, task()
    except GaverifyError as error:
        return False, (time.monotonic(), type(error), str(error))
    except BaseException as error:
        return False, (time.monotonic(), None, "".join(traceback.format_exception(error)).rstrip())


def _gathered(children: Sequence[_Child], timeout: float | None, waiting: Callable[[], None]) -> list[Any]:
    limit = math.inf if timeout is None else time.monotonic() + timeout
    results: dict[int, Any] = {}
    failed: list[_Failure] = []
    while len(results) < len(children):
        busy = [child for child in children if child.pid not in results]
        ready, _, _ = select.select([child.pipe for child in busy], [], [], _POLL)
        waiting()
        for child in busy:
            if child.pipe in ready and _read(child):
                results[child.pid] = _result(child)
                if isinstance(results[child.pid], _Failure):
                    failed.append(results[child.pid])
                    limit = min(limit, time.monotonic() + _LINGER)
        if time.monotonic() > limit:
            break
    if failed:
        raise min(failed, key=lambda failure: failure.at).error
    if len(results) < len(children):
        names = ", ".join(child.name for child in children if child.pid not in results)
        raise ProblemError(f"{names} did not end within {timeout:g} s, and all were ended; --timeout waits longer")
    return [results[child.pid] for child in children]


def _read(child: _Child) -> bool:
    """Reads what is there; whether the other end was closed."""
    while True:
        try:
            piece = os.read(child.pipe, 1 << 20)
        except BlockingIOError:
            return False
        if not piece:
            return True
        child.received += piece


def _result(child: _Child) -> Any:
    """What the task returned, or a `_Failure`."""
    try:
        done, value = pickle.loads(bytes(child.received))
    except (EOFError, pickle.UnpicklingError):
        _, child.status = os.waitpid(child.pid, 0)
        return _Failure(time.monotonic(), ProblemError(f"{child.name} {_ending(child.status)} before it was done"))
    if done:
        return value
    at, kind, message = value
    if kind is not None:
        return _Failure(at, kind(message) if kind in (ProblemError, InternalError) else ProblemError(message))
    shown = "\n".join(message.splitlines()[-_KEPT_LINES:])
    # what the user's code raises is a ProblemError by then; anything else is a fault of ours
    return _Failure(at, InternalError(f"{child.name} raised:\n{shown}"))


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was ended by signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"left with exit code {os.waitstatus_to_exitcode(status)}"


def _end(child: _Child) -> None:
    with contextlib.suppress(OSError):
        os.close(child.pipe)
    if child.status is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        _, child.status = os.waitpid(child.pid, 0)
