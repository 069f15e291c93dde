"""Where in the user's code an exception came from."""

from __future__ import annotations

import os
import traceback

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep


def user_frame(error: BaseException) -> str | None:
    """Returns "file:line" of the innermost frame outside gaverify and torch."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_OWN) and f"{os.sep}torch{os.sep}" not in frame.filename:
            return f"{os.path.relpath(frame.filename)}:{frame.lineno}"
    return None
