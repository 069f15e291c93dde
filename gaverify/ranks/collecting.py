"""What the processes of ranks send back through their pipes: each one's result, and of failures the first.

All that is known of a process here is a pipe that it writes to once; how it was started, forked or fresh, is not.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gaverify.children.output import signal_name
from gaverify.errors import GaverifyError, InternalError, ProblemError

Job = tuple[str, Callable[[], Any]]
"""A name for messages, and what to call; its result must be picklable."""

_POLL = 0.05
_LINGER = 0.5  # seconds: when one rank fails the others lose their connections, and may tell of that first
_KEPT_LINES = 12  # of a traceback that a message shows


class Process(Protocol):
    """What a forked process and a fresh one behind its keeper have in common."""

    def wait(self) -> int:
        """Waits until it has ended; returns its exit code, of one that a signal ended the negative number."""

    def end(self) -> None:
        """Ends it where it has not ended; may be called twice."""


class Child:
    """A process that runs a job.

    Args:
        name: For messages.
        pipe: Read from without waiting; what the process writes there is an `outcome`.
        process: To end it.
    """

    def __init__(self, name: str, pipe: int, process: Process) -> None:
        os.set_blocking(pipe, False)
        self.name, self.pipe, self.process = name, pipe, process
        self._received = bytearray()

    def read(self) -> bool:
        """Reads what is there; whether the other end was closed."""
        while True:
            try:
                piece = os.read(self.pipe, 1 << 20)
            except BlockingIOError:
                return False
            if not piece:
                return True
            self._received += piece

    def result(self) -> Any:
        """What the job returned, or a `_Failure`."""
        try:
            done, value = pickle.loads(bytes(self._received))
        except (EOFError, pickle.UnpicklingError):
            return _Failure(
                time.monotonic(), ProblemError(f"{self.name} {_ending(self.process.wait())} before it was done")
            )
        if done:
            return value
        at, kind, message = value
        if kind is not None:
            return _Failure(at, kind(message) if kind in (ProblemError, InternalError) else ProblemError(message))
        shown = "\n".join(message.splitlines()[-_KEPT_LINES:])
        # what the user's code raises is a ProblemError by then; anything else is a fault of ours
        return _Failure(at, InternalError(f"{self.name} raised:\n{shown}"))


@dataclass(frozen=True)
class _Failure:
    """When a job failed (the clock of all processes is one), and with what."""

    at: float
    error: GaverifyError


def outcome(call: Callable[[], Any]) -> tuple[bool, Any]:
    """What a process writes to its pipe: (True, result), or (False, (time, class of the error, message))."""
    try:
        return True, call()
    except GaverifyError as error:
        return False, (time.monotonic(), type(error), str(error))
    except BaseException as error:
        return False, (time.monotonic(), None, "".join(traceback.format_exception(error)).rstrip())


def collected(starting: Iterable[Child], timeout: float | None, waiting: Callable[[], None]) -> list[Any]:
    """Returns the results of processes in order; none of them is left when it returns or raises.

    Args:
        starting: Starts one process after the other, which run at the same time.
        timeout: Seconds after which it gives up; None waits for ever.
        waiting: Called every few hundredths of a second.

    Raises:
        GaverifyError: What the first job that failed raised, if it was one of gaverify's own errors.
        InternalError: A job raised something else.
        ProblemError: A process died, or was not done in time.
    """
    children: list[Child] = []
    try:
        for child in starting:
            children.append(child)
        return _results(children, timeout, waiting)
    finally:
        for child in children:
            child.process.end()


def _results(children: Sequence[Child], timeout: float | None, waiting: Callable[[], None]) -> list[Any]:
    limit = math.inf if timeout is None else time.monotonic() + timeout
    results: dict[Child, Any] = {}
    failed: list[_Failure] = []
    while len(results) < len(children):
        busy = [child for child in children if child not in results]
        ready, _, _ = select.select([child.pipe for child in busy], [], [], _POLL)
        waiting()
        for child in busy:
            if child.pipe in ready and child.read():
                results[child] = child.result()
                if isinstance(results[child], _Failure):
                    failed.append(results[child])
                    limit = min(limit, time.monotonic() + _LINGER)
        if time.monotonic() > limit:
            break
    if failed:
        raise min(failed, key=lambda failure: failure.at).error
    if len(results) < len(children):
        names = ", ".join(child.name for child in children if child not in results)
        raise ProblemError(f"{names} did not end within {timeout:g} s, and all were ended; --timeout waits longer")
    return [results[child] for child in children]


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by signal {signal_name(-code).removeprefix('signal ')}"
    return f"left with exit code {code}"
