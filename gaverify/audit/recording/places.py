"""The line of the script that is running, and a hunt for the line that changes something."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from gaverify.tracebacks import Owner, Place, calling_frame, owner_of


def user_place() -> Place | None:
    """Returns file and line of the innermost frame of the user's code; None where only libraries are on the stack.

    The path is absolute: a script may change its folder before anybody reads the record.
    """
    place = calling_frame(Owner.USER)
    return None if place is None else (os.path.abspath(place[0]), place[1])


def _is_users(frame: FrameType) -> bool:
    return owner_of(frame.f_code.co_filename) is Owner.USER


class LineHunt:
    """Finds the line after which something has changed, by asking after every line of the user's code.

    Far too slow to be on always: it is started only once a change without a known place was seen, and only for the
    stretch of the loop where it happened.
    """

    def __init__(self) -> None:
        self._changed: Callable[[], bool] | None = None
        self._last: Place | None = None
        self._frames: list[FrameType] = []
        self.found: Place | None = None

    @property
    def active(self) -> bool:
        """Whether lines are being watched."""
        return self._changed is not None

    def start(self, changed: Callable[[], bool]) -> None:
        """Watches the lines of the frames that are running, until `stop`; not while a debugger does."""
        if sys.gettrace() is not None:
            return
        self._changed, self._last = changed, user_place()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if _is_users(frame) and frame.f_trace is None:
                frame.f_trace = self._on_line
                self._frames.append(frame)
            frame = frame.f_back
        sys.settrace(self._on_call)

    def stop(self) -> None:
        """Ends the watch."""
        if self._changed is None:
            return
        self._changed = None
        sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None
        self._frames.clear()

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if _is_users(frame) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._changed is None or self.found is not None:
            return None
        if event in ("line", "return"):
            if self._changed():
                self.found = self._last
                return None
            caller = frame.f_back if event == "return" else frame  # the rest of the caller's line is still to run
            if caller is not None and _is_users(caller):
                self._last = os.path.abspath(caller.f_code.co_filename), caller.f_lineno
        return self._on_line
