"""Folders that go with gaverify, or with the next run where gaverify was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gaverify.errors import GaverifyError, is_out_of_space

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
        prefix: The beginning of the folder's name.
    """
    remove_abandoned(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        with _lock_owner_file(folder), told_where_full(folder):
            yield folder
    finally:
        remove(folder)


@contextmanager
def told_where_full(folder: Path) -> Iterator[None]:
    """Names the folder where a disk fills up: what fails to write knows of no file.

    Raises:
        GaverifyError: There was no space left.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not is_out_of_space(error):
            raise
        raise GaverifyError(f"no space left in `{folder}`; free some, or set TMPDIR to a larger disk") from error


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
def _lock_owner_file(folder: Path) -> Iterator[None]:
    new = folder / f"{_OWNER}.new"
    with new.open("wb") as lock:
        if fcntl is not None:
            # A file system without locks: the folder looks abandoned only to a run that has them.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / _OWNER)  # the name appears only once it is locked
        yield


def remove(folder: Path) -> None:
    """Removes a file, or a folder with all that it holds, also what an overlay leaves without permissions."""

    def retry_with_permissions(function: Callable[[str], object], path: str, error: object) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            if function in (os.scandir, os.open, os.lstat):
                shutil.rmtree(path, ignore_errors=True)
            else:
                function(path)

    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, onerror=retry_with_permissions)
    else:
        folder.unlink(missing_ok=True)
