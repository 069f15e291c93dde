"""Carries progress from a process that computes to the one that shows it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Sender:
    """The end of a pipe with a name that any process may write reports to; they may get lost, never block."""

    path: Path

    @cached_property
    def _writing(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)

    def __call__(self, label: str, done: int, total: int) -> None:
        """Hands a report over; drops it where the pipe is full."""
        with contextlib.suppress(OSError):
            os.write(self._writing, json.dumps([label, done, total]).encode() + b"\n")


class Relay:
    """The other end of the pipe.

    Args:
        report: Told what arrives.
        folder: Where the pipe shall be.
    """

    def __init__(self, report: Callable[[str, int, int], None], folder: Path) -> None:
        self._report = report
        self.sender = Sender(folder / "progress")
        os.mkfifo(self.sender.path)
        self._reading = os.open(self.sender.path, os.O_RDONLY | os.O_NONBLOCK)

    def drain(self) -> None:
        """Reports the latest that arrived."""
        with contextlib.suppress(BlockingIOError):
            lines = os.read(self._reading, 1 << 16).splitlines()
            if lines:
                with contextlib.suppress(ValueError):  # the last line may be cut
                    self._report(*json.loads(lines[-1]))

    def close(self) -> None:
        """Frees the pipe."""
        os.close(self._reading)
