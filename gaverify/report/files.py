"""Reports in files: whether one can be written, and writing it whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gaverify.errors import SpecError
from gaverify.report.formats import format_for


def check_writable(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Checks every path before anything runs, so that a long run does not end without its report.

    Raises:
        SpecError: With a sentence for each path that has an unknown ending, cannot be written or is named twice.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for path in map(Path, paths):
        problems += _problems(path)
        real = os.path.realpath(path)  # Path.resolve raises on links that lead to each other
        if real in seen:
            problems.append(f"`{path}` is named twice: one report would overwrite the other")
        seen.add(real)
    if problems:
        raise SpecError(problems)


def _problems(path: Path) -> list[str]:
    problems: list[str] = []
    try:
        format_for(path)
    except SpecError as error:
        problems += error.problems
    if path.is_dir():
        problems.append(f"`{path}` is a folder, not a file to write a report to")
    elif path.exists() and not os.access(path, os.W_OK):
        problems.append(f"`{path}` may not be written")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        problems.append(f"`{path}` cannot be written: there is no folder `{folder}`")
    elif not os.access(folder, os.W_OK | os.X_OK):
        problems.append(f"`{path}` cannot be written: no permission to write in `{folder}`")
    return problems


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` as UTF-8 so that `path` holds the old content or the new, never a part, even after Ctrl-C.

    The new content is written under a random name that must not exist yet, so that nobody who may write in the folder
    can have put a link there. A file that is replaced keeps its mode; a new one gets what the umask leaves.

    Raises:
        SpecError: The folder is gone, full or may not be written.
    """
    target = Path(os.path.realpath(path))  # through a symbolic link to the file it names, as a plain write would
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".gaverify-", suffix=".tmp", dir=target.parent)
        with open(descriptor, "w", encoding="utf-8", newline="\n") as stream:
            os.chmod(temporary, _mode(target))
            stream.write(text)
        os.replace(temporary, target)
    except OSError as error:
        raise SpecError(f"`{os.fspath(path)}` could not be written: {error.strerror or error}") from error
    finally:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)


def _mode(target: Path) -> int:
    """The permissions that the file has, or that a plain write would give a new one."""
    with suppress(OSError):
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)  # the only way to read it
    os.umask(mask)
    return 0o666 & ~mask
