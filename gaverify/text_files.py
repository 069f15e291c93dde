"""Text and TOML files that people name: read whole or written whole, or a sentence on why not."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from gaverify.errors import SpecError


def text_of_file(file: Path, what: str, most: int = 1 << 20) -> str:
    """Returns the text of a file, without the byte-order mark that Windows' editors put first.

    Args:
        file: The file to read.
        what: The noun for its contents, for messages.
        most: Bytes; what is larger, or has no end, is none.

    Raises:
        SpecError: It is no file but a pipe or a device, which may never end; it is too large, or no text.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise SpecError("cannot be read: it is no regular file", str(file))
        with file.open("rb") as stream:
            raw = stream.read(most + 1)
        if len(raw) > most:
            raise SpecError(f"holds more than {most >> 20} MiB, which is no {what}", str(file))
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror or error}", str(file)) from error
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text: byte {error.start} cannot be read; save the file as UTF-8"
        raise SpecError(message, str(file)) from error


def table_of_file(file: Path, what: str) -> dict[str, Any]:
    """Returns the table that a TOML file holds.

    Raises:
        SpecError: As of `text_of_file`, or it is not TOML; the sentence says where.
    """
    try:
        return tomllib.loads(text_of_file(file, what))
    except ValueError as error:
        place = re.search(r" \(at (.*)\)$", str(error))
        where, message = (place[1], str(error).removesuffix(place[0])) if place else ("somewhere", str(error))
        raise SpecError(f"{where}: not TOML: {message}", str(file)) from error
    except RecursionError as error:
        raise SpecError("lists or tables stand too deep in each other; one level is enough", str(file)) from error


def write_whole(path: str | os.PathLike[str], text: str | bytes) -> None:
    """Writes `text`, as UTF-8, so that `path` holds the old content or the new, never a part, even after Ctrl-C.

    The new content is written under a random name that must not exist yet: nobody who may write in the folder can have
    put a link there. A file that is replaced keeps its owner and mode; a new one gets what the umask leaves.
    A device, a pipe and a file with several names or with an owner that cannot be kept are written into instead.

    Raises:
        SpecError: The folder is gone, full or may not be written.
    """
    # The command line, which reports show, may hold a file name that is no UTF-8.
    content = text if isinstance(text, bytes) else text.encode("utf-8", errors="replace")
    target = Path(os.path.realpath(path))  # through a symbolic link to the file it names, as a plain write would
    temporary = ""
    try:
        status = status_of(path)
        if status is not None and not is_replaced(status):
            _write_into(path, content)
            return
        descriptor, temporary = tempfile.mkstemp(prefix=".gaverify-", suffix=".tmp", dir=target.parent)
        with open(descriptor, "wb") as stream:
            stream.write(content)
        if status is not None:
            try:
                os.chown(temporary, status.st_uid, status.st_gid)
            except PermissionError:  # the file belongs to somebody else, and shall go on to
                _write_into(path, content)
                return
        os.chmod(temporary, _new_mode() if status is None else stat.S_IMODE(status.st_mode))
        os.replace(temporary, target)
    except OSError as error:
        why = "nobody reads this pipe" if error.errno == errno.ENXIO else error.strerror or error
        raise SpecError(f"`{os.fspath(path)}` could not be written: {why}") from error
    finally:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)


def status_of(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Returns what the system says about a file, through links; None where there is none yet."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def is_replaced(status: os.stat_result) -> bool:
    """Whether a new file may stand in the place of this one: a device, a pipe and a second name would be lost."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _write_into(path: str | os.PathLike[str], content: bytes) -> None:
    # Without waiting: a pipe that nobody reads would never open.
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as stream:
        stream.write(content)


def _new_mode() -> int:
    """The permissions that a plain write would give a new file."""
    mask = os.umask(0)  # the only way to read it
    os.umask(mask)
    return 0o666 & ~mask
