"""The place of a draw in the code, as it is the same in every process that runs this code."""

from __future__ import annotations

import sys

from gaverify.tracebacks import Owner, owner_of

Site = tuple[tuple[str, int], ...]
"""File and instruction of the frames up to the user's own line; of those further out, file and first line."""

_DEPTH = 200


def site() -> Site:
    """Returns the place that is running now.

    Which line called the user's function is left out: a loop that loads its next batch ahead calls the same function
    from two lines.
    """
    found: list[tuple[str, int]] = []
    frame, inside = sys._getframe(1), True
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        owner = owner_of(code.co_filename)
        if not frame.f_globals.get("__name__", "").startswith(("gaverify.", "torch.utils._python_dispatch")):
            found.append((code.co_filename, frame.f_lasti if inside else code.co_firstlineno))
        inside = inside and owner is not Owner.USER
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)
