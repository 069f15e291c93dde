"""Keeps the recorder's own code apart from the script's: what is recorded, and what a failure of the recorder ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.values import out_of_sight, suspend_modes


class Guard:
    """Decides which calls are recorded, and runs the code that records them.

    Args:
        storage: Ends the process where that code fails.
    """

    def __init__(self, storage: Storage) -> None:
        self.lock = threading.RLock()
        """Held while anything is recorded: the script may train in several threads."""
        self.closed = False
        """Whether the closing record has been written: nothing is recorded any more."""
        self.searching: Any = None
        """The optimizer whose step evaluates its closure again, as a line search does; None elsewhere."""
        self.left_out: dict[str, int] = {}
        """Calls that could not be recorded, by what hid the values of their tensors."""
        self._storage = storage
        self._is_busy = False

    @property
    def off(self) -> bool:
        """Whether a call is not to be recorded: the recorder's own, a line search's, or one in a worker process.

        Nor can a call be recorded whose tensors have no values; it is counted in `left_out`.
        """
        # A forked worker has a copy of the recorder, whose files belong to the process that opened them.
        if self._is_busy or self.searching is not None or os.getpid() != self._storage.process:
            return True
        why = out_of_sight()
        if why:  # the report says what was not seen
            self.leave_out(why)
        return bool(why)

    def leave_out(self, why: str) -> None:
        """Counts a call that cannot be recorded."""
        self.left_out[why] = self.left_out.get(why, 0) + 1

    @contextmanager
    def work(self) -> Iterator[None]:
        """Runs the recorder's own code: one thread at a time, unrecorded, its failures never the script's."""
        with self.lock:
            before, self._is_busy = self._is_busy, True  # a handler may run inside another one's work
            try:
                with suspend_modes():
                    yield
            except Exception as error:  # the script must not catch it: it would go on unrecorded
                self._storage.give_up(error)
            finally:
                self._is_busy = before or self.closed
