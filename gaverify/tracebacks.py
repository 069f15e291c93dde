"""Where in the user's code an exception, or an operation that runs right now, comes from; and whose fault it is."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from gaverify.errors import GaverifyError, InternalError, ProblemError, is_out_of_memory

Place = tuple[str, int]
"""A file, as the interpreter names it, and a line."""

_OWN = os.path.dirname(os.path.realpath(__file__)) + os.sep
_ZOO = os.path.join(_OWN, "zoo") + os.sep  # the built-in models stand in for a library's code
_STANDARD = tuple(
    {os.path.realpath(path) + os.sep for key in ("stdlib", "platstdlib") if (path := sysconfig.get_paths().get(key))}
)
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_ROOMS = tuple(os.path.join(_OWN, room) + os.sep for room in ("passes", "verdict", "search"))  # run in a pass
_PASSES = tuple(os.path.join(_OWN, "passes", name) for name in ("gradients.py", "task.py"))  # call the user's code
_home: list[str] = []
_handing_over: set[CodeType] = set()
F = TypeVar("F", bound=Callable[..., Any])


class Owner(IntEnum):
    """Who wrote a file, from what no report would name to what the user can change."""

    MACHINERY = 0
    """gaverify, torch, Python itself, and generated code."""
    LIBRARY = 1
    """An installed package: the models of transformers, say. A report about a model may name its lines."""
    USER = 2


def set_home(folder: str) -> None:
    """Declares a folder as the user's own, also where it lies inside Python's standard library."""
    _home[:] = [os.path.realpath(folder) + os.sep]
    owner_of.cache_clear()


@cache
def owner_of(filename: str) -> Owner:
    """Returns who wrote the file of a code object."""
    if filename.startswith("<"):
        return Owner.MACHINERY
    path = os.path.realpath(filename)
    if path.startswith(_OWN):
        return Owner.LIBRARY if path.startswith(_ZOO) else Owner.MACHINERY
    if _is_torch(path):
        return Owner.MACHINERY
    if _is_installed(path) and not (path.startswith(tuple(_home)) and all(map(_is_installed, _home))):
        return Owner.LIBRARY  # unless the script itself is installed, as recipes are
    if path.startswith(_STANDARD) and not path.startswith(tuple(_home)):
        return Owner.MACHINERY
    return Owner.USER


def _is_installed(path: str) -> bool:
    """Whether a file lies in a package, or a folder is one."""
    return any(path.partition(part)[2] for part in _LIBRARIES)


def _is_torch(path: str) -> bool:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return torch is not None and path.startswith(os.path.dirname(os.path.realpath(torch)) + os.sep)


def hands_over(function: F) -> F:
    """Marks a function of gaverify's that calls the user's code or a kernel of torch.

    An exception that is raised by such a call, and not by work of gaverify's own, is the user's.
    """
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is not None:
        _handing_over.add(code)
    return function


def is_own_fault(error: BaseException) -> bool:
    """Whether gaverify itself made an exception that was raised during a pass.

    It did where the innermost of its functions in the traceback does work of its own: fingerprints a result, compares
    rows, restores state. Functions that hand a call over, and are marked so, did not.
    """
    if isinstance(error, GaverifyError) or is_out_of_memory(error):
        return isinstance(error, InternalError)
    own_code = [code for code in _codes(error) if code.co_filename.startswith(_ROOMS)]
    return bool(own_code) and own_code[-1] not in _handing_over


def ends_in_call(error: BaseException) -> bool:
    """Whether a kernel raised an exception that gaverify handed a call over to; it has no frame of its own."""
    return any(code in _handing_over for code in list(_codes(error))[-1:])


def _codes(error: BaseException) -> Iterator[CodeType]:
    """The functions in an exception's traceback, the innermost last."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame.f_code
        step = step.tb_next


def user_frame(error: BaseException) -> str | None:
    """Returns "file:line" of the innermost frame of the user's or a library's code that an exception went through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if owner_of(frame.filename) >= Owner.LIBRARY:
            return f"{display_path(frame.filename)}:{frame.lineno}"
    return None


def calling_frame(least: Owner = Owner.LIBRARY) -> Place | None:
    """Returns the innermost place that is running now in code of the user's, or of a library's unless `least` says no.

    None where only other code is on the stack.
    """
    frame = running_frame(least)
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def running_frame(least: Owner = Owner.LIBRARY) -> FrameType | None:
    """Returns the innermost frame that is running now in code of the user's, or of a library's unless `least` says no.

    Who called gaverify is not looked at: during a pass the search ends where gaverify calls the user's loss or a
    backward.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in _PASSES:
        if owner_of(frame.f_code.co_filename) >= least:
            return frame
        frame = frame.f_back
    return None


def user_place() -> Place | None:
    """Returns file and line of the innermost frame of the user's code; None where only libraries are on the stack.

    The path is absolute: a script may change its folder before anybody reads the record.
    """
    place = calling_frame(Owner.USER)
    return None if place is None else (os.path.abspath(place[0]), place[1])


class LineHunt:
    """Finds the line after which something has changed, by asking after every line of the user's code.

    Far too slow to be on always: it is started only where a change without a known line was seen.

    Args:
        changed: Whether what is looked for has come about, given the line that has run last; True ends the hunt.
        least: The owner whose lines are looked at.
    """

    def __init__(self, changed: Callable[[Place], bool], least: Owner) -> None:
        self._changed, self._least = changed, least
        self._last: Place | None = None
        self._frames: list[FrameType] = []
        self._outer: Any = None
        self.active = False
        self.found: Place | None = None

    def start(self, *, running: bool = False) -> None:
        """Watches until `stop`; a debugger's or coverage's own tracing pauses meanwhile.

        Args:
            running: Watch the functions that run already, too, and not only those that will be called.
        """
        self.active, self._outer = True, sys.gettrace()
        frame: FrameType | None = sys._getframe(1) if running else None
        while frame is not None:
            if self._is_watched(frame):
                self._last = self._last or _place(frame)
                if frame.f_trace is None:
                    frame.f_trace = self._on_line
                    self._frames.append(frame)
            frame = frame.f_back
        sys.settrace(self._on_call)

    def stop(self) -> None:
        """Ends the watch."""
        if not self.active:
            return
        self.active = False
        sys.settrace(self._outer)
        for frame in self._frames:
            frame.f_trace = None
        self._frames.clear()

    def look(self) -> None:
        """Asks whether the last line has changed something."""
        if self.found is None and self._last is not None and self._changed(self._last):
            self.found = self._last

    def _is_watched(self, frame: FrameType) -> bool:
        return owner_of(frame.f_code.co_filename) >= self._least

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if self._is_watched(frame) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self.active or self.found is not None:
            return None
        if event in ("line", "return"):
            self.look()
            caller = frame.f_back if event == "return" else frame  # the rest of the caller's line is still to run
            if caller is not None and self._is_watched(caller):
                self._last = _place(caller)
        return self._on_line


def _place(frame: FrameType) -> Place:
    """File and line that a frame is at; absolute, as a script may change its folder before anybody reads it."""
    return os.path.abspath(frame.f_code.co_filename), frame.f_lineno


def repository_of(folder: Path) -> Path | None:
    """Returns the nearest folder upwards that holds `.git`; None where there is none."""
    return next((candidate for candidate in (folder, *folder.parents) if (candidate / ".git").exists()), None)


def portable(filename: str) -> str:
    """Returns a path that names the same file on another machine and from another current folder.

    A library's file is named from `site-packages` on, a file in a repository from the repository on; any other stays as
    it is.
    """
    for folder in _LIBRARIES:
        if folder in filename:
            return filename.rpartition(folder)[2].replace(os.sep, "/")
    path = Path(os.path.abspath(filename))
    root = repository_of(path.parent)
    return filename if root is None else path.relative_to(root).as_posix()


def display_path(filename: str) -> str:
    """Returns a path as people write it: relative where that is shorter and the file lies below the current folder."""
    try:
        relative = os.path.relpath(filename)
    except ValueError:  # another drive
        return filename
    return filename if relative.startswith("..") else relative


def fill_in(part: str) -> Any:
    """Stands in a factory that `gaverify init` wrote, until its owner writes the part.

    Args:
        part: The missing part: "the loss".

    Raises:
        ProblemError: Always, with the line of the call.
    """
    caller = sys._getframe(1)
    raise ProblemError(f"fill in {part}: line {caller.f_lineno} of {display_path(caller.f_code.co_filename)}")
