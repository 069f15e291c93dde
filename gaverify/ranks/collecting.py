"""What the processes of ranks send back through their pipes: each one's result, and of failures the first.

All that is known of a process here is a pipe that it writes to once; how it was started, forked or fresh, is not.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gaverify.errors import GaverifyError, InternalError, ProblemError

Job = tuple[str, Callable[[], Any]]
"""A name for messages, and what to call; its result must be picklable."""

_POLL = 0.05
_LINGER = 0.5  # seconds: when one rank fails the others lose their connections, and may tell of that first
_KEPT_LINES = 12  # of a traceback that a message shows


class Child(ABC):
    """A process that runs a job.

    Args:
        name: For messages.
        pipe: Read from without waiting; what the process writes there is an `outcome`.
    """

    def __init__(self, name: str, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self.name, self.pipe = name, pipe
        self._received = bytearray()

    @abstractmethod
    def exit_code(self) -> int:
        """Waits until the process has ended; returns its exit code, of one that a signal ended the negative number."""

    @abstractmethod
    def end(self) -> None:
        """Ends the process where it has not ended; may be called twice."""

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
                time.monotonic(), ProblemError(f"{self.name} {_ending(self.exit_code())} before it was done")
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


def collected(children: Sequence[Child], timeout: float | None, waiting: Callable[[], None]) -> list[Any]:
    """Returns the results of the processes in order.

    Args:
        children: All that run at the same time.
        timeout: Seconds after which it gives up; None waits for ever.
        waiting: Called every few hundredths of a second.

    Raises:
        GaverifyError: What the first job that failed raised, if it was one of gaverify's own errors.
        InternalError: A job raised something else.
        ProblemError: A process died, or was not done in time.
    """
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
        return f"was ended by signal {signal.Signals(-code).name}"
    return f"left with exit code {code}"
