"""The line of the script that is running."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

from gaverify.tracebacks import Owner, Place, calling_frame, owner_of


def user_place() -> Place | None:
    """Returns file and line of the innermost frame of the user's code; None where only libraries are on the stack.

    The path is absolute: a script may change its folder before anybody reads the record.
    """
    place = calling_frame(Owner.USER)
    return None if place is None else (os.path.abspath(place[0]), place[1])


class Callers:
    """The functions that were running when this was made: the loop that calls `backward`, and who called it."""

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if owner_of(frame.f_code.co_filename) is not Owner.MACHINERY:
                self._codes[id(frame)] = frame.f_code
            frame = frame.f_back

    def place(self, last: Place) -> Place:
        """Returns the line in which such a function, or the first of the user's that it has called, does something now.

        What an own class does deep in its methods is so the line of the loop that calls it.

        Args:
            last: The line of the user's that has run last.
        """
        found = last
        innermost = True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if owner_of(frame.f_code.co_filename) is Owner.USER:
                found = last if innermost else (os.path.abspath(frame.f_code.co_filename), frame.f_lineno)
                innermost = False
            if self._codes.get(id(frame)) is frame.f_code and not innermost:
                return found
            frame = frame.f_back
        return last
