"""Carries progress from a forked process to its parent."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable


class Relay:
    """A pipe for progress reports: the child calls `send`, the parent `drain`. Reports may get lost, never block."""

    def __init__(self, report: Callable[[str, int, int], None]) -> None:
        self._report = report
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)

    def send(self, label: str, done: int, total: int) -> None:
        """Hands a report to the parent; drops it where the pipe is full."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._writing, json.dumps([label, done, total]).encode() + b"\n")

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
        os.close(self._writing)
