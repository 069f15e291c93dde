"""The garbage collector looks through every object again and again: while torch is imported, and all of it at exit.

It finds nothing there, and for a small model it costs more than the verification itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Switches the garbage collector off inside the block, and on again behind it if it was on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def leave_to_the_system() -> None:
    """Takes every object out of the collector's sight, at the end of a process that is gaverify's own."""
    gc.freeze()
