"""What a child says: its stdout, kept for its answer; the cause of a failure in a line, a signal, its last lines."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

_TAIL = 15
_READ = 1 << 14  # bytes of a log that are read from its end
_NO_NUMPY = "UserWarning: Failed to initialize NumPy"
_MARK = "Traceback (most recent call last):"


def private_stdout() -> int:
    """Returns a descriptor of stdout for the answer, and points what everybody else calls stdout at stderr."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


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
    kept: list[str] = []
    warned = False
    for line in lines:
        source = warned and line.startswith("  ")
        warned = _NO_NUMPY in line
        if not warned and not source:
            kept.append(line)
    return kept


def signal_name(number: int) -> str:
    """Returns the name of the signal that ended a child, such as SIGKILL; `signal 40` where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
