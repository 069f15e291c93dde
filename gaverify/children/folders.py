"""Temporary folders that are removed when the process that made them ends.

Where that process was killed and could not remove its folder, the next run does.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: the folders of killed runs stay
    fcntl = None  # type: ignore[assignment]

_OWNER = "owner"


@contextmanager
def working_folder(prefix: str) -> Iterator[Path]:
    """Gives a new folder in the system's place for temporary files, and takes away those of runs that were killed.

    The owner holds a lock on a file in the folder. The system lets go of it when the process ends, however it ends, and
    a folder whose lock is free has no owner any more.

    Args:
        prefix: Of the folder's name.
    """
    remove_abandoned(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        with _owned(folder):
            yield folder
    finally:
        remove(folder)


def remove_abandoned(prefix: str) -> None:
    """Removes folders with this prefix whose owner is gone; those of other users stay, and so do links."""
    if fcntl is None:
        return
    for owner in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_OWNER}"):
        with suppress(OSError):
            if owner.parent.is_symlink() or owner.parent.stat().st_uid != os.geteuid():
                continue
            with owner.open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(owner.parent)


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    new = folder / f"{_OWNER}.new"
    with new.open("wb") as lock:
        _lock(lock)
        new.rename(folder / _OWNER)  # the name appears only once it is locked
        yield


def remove(folder: Path) -> None:
    """Removes a file, or a folder with all that it holds, also what an overlay leaves without permissions."""

    def again(function: Callable[[str], object], path: str, error: object) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            if function in (os.scandir, os.open, os.lstat):
                shutil.rmtree(path, ignore_errors=True)
            else:
                function(path)

    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, onerror=again)
    else:
        folder.unlink(missing_ok=True)


def _lock(stream: IO[bytes]) -> None:
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks: the folder looks abandoned only to a run that has them
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
