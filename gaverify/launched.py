"""What the environment of a launcher says about this process; read without torch, as the command line does."""

from __future__ import annotations

import os

leave = os._exit
"""Ends the process; `guarding` keeps the user's code from it, so that it is noted before that runs."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> tuple[int, int] | None:
    """Returns the rank and the number of ranks that torchrun, `accelerate launch` and the like have set; None alone."""
    words = [os.environ.get(name, "") for name in _NEEDED]
    if not all(words) or not (words[0].isdecimal() and words[1].isdecimal()):
        return None
    rank, count = int(words[0]), int(words[1])
    return (rank, count) if count > 1 else None


def is_first() -> bool:
    """Whether this process is the one that reports: rank 0, or one that nothing launched."""
    found = launched()
    return found is None or found[0] == 0
