"""Reports in files: which format a name asks for, whether it can be written, and writing it whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gaverify.errors import SpecError

FORMATS = {".txt": "text", ".json": "json", ".xml": "junit", ".svg": "svg", ".html": "html"}
"""File ending → format."""


def format_for(path: str | os.PathLike[str]) -> str:
    """Returns the format that the ending of `path` asks for.

    Raises:
        SpecError: The ending is none of the known ones; the message names them.
    """
    ending = Path(path).suffix.lower()
    if ending not in FORMATS:
        known = ", ".join(FORMATS)
        raise SpecError(f"`{os.fspath(path)}` has no ending that says which report to write; known are {known}")
    return FORMATS[ending]


def check_writable(paths: Sequence[str | os.PathLike[str]]) -> None:
    """Checks every path before anything runs, so that a long run does not end without its report.

    Raises:
        SpecError: With a sentence for each path that has an unknown ending or cannot be written.
    """
    problems = [problem for path in paths for problem in _problems(Path(path))]
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
    folder = path.resolve().parent
    if not folder.is_dir():
        problems.append(f"`{path}` cannot be written: there is no folder `{folder}`")
    elif not os.access(folder, os.W_OK | os.X_OK):
        problems.append(f"`{path}` cannot be written: no permission to write in `{folder}`")
    return problems


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` as UTF-8 so that `path` holds the old content or the new, never a part, even after Ctrl-C.

    Raises:
        SpecError: The folder is gone, full or may not be written.
    """
    target = Path(path).resolve()  # through a symbolic link to the file it names, as a plain write would
    temporary = target.with_name(f".gaverify-{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, target)
    except OSError as error:
        raise SpecError(f"`{os.fspath(path)}` could not be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
