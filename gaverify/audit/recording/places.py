"""Where in the user's code the interpreter is: the innermost frame outside libraries, and a hunt for a line."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

Place = tuple[str, int]

_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_STANDARD = tuple(
    {os.path.realpath(path) + os.sep for key in ("stdlib", "platstdlib") if (path := sysconfig.get_paths().get(key))}
)
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_home: list[str] = []


def set_home(folder: str) -> None:
    """Declares the folder of the script as the user's own, also where it lies inside an environment's libraries."""
    _home[:] = [os.path.realpath(folder) + os.sep]
    is_user_file.cache_clear()


@cache
def is_user_file(filename: str) -> bool:
    """Returns whether a code object's file is the user's: not gaverify's, a library's or generated."""
    if filename.startswith("<"):
        return False
    path = os.path.realpath(filename)
    if path.startswith(_OWN):
        return False
    if any(path.startswith(home) for home in _home) and not any(part in path for part in _LIBRARIES):
        return True
    return not (path.startswith(_STANDARD) or any(part in path for part in _LIBRARIES))


def user_place() -> Place | None:
    """Returns file and line of the innermost frame of the user's code; None where only libraries are on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return os.path.abspath(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back
    return None


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
            if is_user_file(frame.f_code.co_filename) and frame.f_trace is None:
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
        return self._on_line if is_user_file(frame.f_code.co_filename) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._changed is None or self.found is not None:
            return None
        if event in ("line", "return"):
            if self._changed():
                self.found = self._last
                return None
            self._last = os.path.abspath(frame.f_code.co_filename), frame.f_lineno
        return self._on_line
