"""Where in the user's code an exception, or an operation that runs right now, comes from."""

from __future__ import annotations

import os
import sys
import traceback
from functools import cache

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ZOO = os.path.join(_OWN, "zoo") + os.sep  # the built-in models stand in for a user's code


@cache
def is_user_file(filename: str) -> bool:
    """Whether a file is neither gaverify's nor torch's nor part of Python itself."""
    if filename.startswith("<"):
        return False
    torch = sys.modules.get("torch")
    own = torch is not None and filename.startswith(os.path.dirname(os.path.abspath(str(torch.__file__))) + os.sep)
    library = filename.startswith(os.path.dirname(os.__file__) + os.sep) and "-packages" not in filename
    return not (own or library or (filename.startswith(_OWN) and not filename.startswith(_ZOO)))


def user_frame(error: BaseException) -> str | None:
    """Returns "file:line" of the innermost frame outside gaverify and torch."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            return f"{shown(frame.filename)}:{frame.lineno}"
    return None


def calling_frame() -> tuple[str, int] | None:
    """Returns file and line of the innermost frame outside gaverify and torch that is running now."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def shown(filename: str) -> str:
    """Returns a path as people write it: relative where that is shorter and the file lies below the current folder."""
    try:
        relative = os.path.relpath(filename)
    except ValueError:  # another drive
        return filename
    return filename if relative.startswith("..") else relative
