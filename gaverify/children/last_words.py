"""How a process ended: its exit code, the last lines that it printed, an exception in a line."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TAIL = 15
_READ = 1 << 14  # bytes of a log that are read from its end
_NO_NUMPY = "UserWarning: Failed to initialize NumPy"
_MARK = "Traceback (most recent call last):"


class Ended(NamedTuple):
    """The end of a process; its text completes "the process …".

    Args:
        code: The exit code; negative: the signal that ended it.
    """

    code: int

    @property
    def is_killed(self) -> bool:
        """Whether SIGKILL ended it: Linux ends a process so where memory runs out, and leaves no other message."""
        return self.code == -9  # Windows has no such signal

    def __str__(self) -> str:
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = str(-self.code)
        return f"was ended by signal {name}{' (out of memory?)' if self.is_killed else ''}"


def last_lines(log: Path) -> list[str]:
    """Returns the last lines of a child's output; none where it printed nothing."""
    with suppress(OSError), log.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - _READ))
        lines = stream.read().decode("utf-8", "replace").splitlines()
        return [line for line in _without_numpy(lines) if line.strip()][-_TAIL:]
    return []


def _without_numpy(lines: list[str]) -> list[str]:
    """Leaves out what torch says at every import where NumPy is not installed: it would read as a run's last words.

    Python prints a warning as its text and, indented below, the line of source that it comes from.
    """
    other_lines: list[str] = []
    warned = False
    for line in lines:
        source = warned and line.startswith("  ")
        warned = _NO_NUMPY in line
        if not warned and not source:
            other_lines.append(line)
    return other_lines


def cause_of(error: BaseException) -> str:
    """Returns an exception in a line: `ValueError: the first line of its message`.

    An exception that carries the traceback of another process (of a data loader's worker, of `mp.spawn`) is told by
    that traceback's last line.
    """
    name = type(error).__name__
    try:
        message = str(error).strip()
    except Exception:
        return name
    lines = [line for line in message.splitlines() if line.strip()]
    if _MARK in message:
        ends = [
            line
            for line in lines[lines.index(next(line for line in lines if _MARK in line)) + 1 :]
            if not line.startswith(" ")
        ]
        return ends[-1].strip() if ends else name
    return f"{name}: {lines[0].strip()}" if lines else name
