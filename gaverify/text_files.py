"""Text files that people name: read whole, or a sentence on why not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gaverify.errors import SpecError


def text_of_file(file: Path, what: str, most: int = 1 << 20) -> str:
    """Returns the text of a file, without the byte-order mark that Windows' editors put first.

    Args:
        file: What to read.
        what: What it should be, for messages.
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
        told = f"not UTF-8 text: byte {error.start} cannot be read; save the file as UTF-8"
        raise SpecError(told, str(file)) from error
