"""What the user's code may not do to the process that it shares with gaverify."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from gaverify.errors import HardExit, current_folder


@contextmanager
def guard_process() -> Iterator[None]:
    """While the user's code runs: `os._exit` raises `HardExit`, and a change of the current folder ends with the block.

    Without the first a factory could end gaverify, or a whole run of pytest, with 0. Without the second reports would
    be written, and the next specs looked for, in a folder that nobody named.
    """
    leave, process, folder = os._exit, os.getpid(), current_folder()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a child that was forked leaves by it, as it must
            leave(status)
        raise HardExit(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave
        if folder is not None:
            with suppress(OSError):
                os.chdir(folder)
