"""Text and TOML files that people name: read whole, or a sentence on why not."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

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
