"""Lets SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that `finally` blocks run before the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into KeyboardInterrupt, so that children and folders go whichever signal ends the run.

    A signal that is ignored (nohup) stays ignored, and one that the caller handles stays the caller's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
