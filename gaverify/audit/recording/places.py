"""The line of the script that is running."""

from __future__ import annotations

import os

from gaverify.tracebacks import Owner, Place, calling_frame


def user_place() -> Place | None:
    """Returns file and line of the innermost frame of the user's code; None where only libraries are on the stack.

    The path is absolute: a script may change its folder before anybody reads the record.
    """
    place = calling_frame(Owner.USER)
    return None if place is None else (os.path.abspath(place[0]), place[1])
