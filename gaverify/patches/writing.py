"""Writes a patch into the user's files, all of them or none, and keeps all that it does not change."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gaverify.errors import ProblemError, SpecError
from gaverify.patches.sources import apply, decode_source, encode_source
from gaverify.records.patch import Patch
from gaverify.text_files import write_whole

_INSTALLED = {"site-packages", "dist-packages"}


def write(patch: Patch) -> None:
    """Writes a patch into the user's files; modes, line ends and links stay.

    Raises:
        ProblemError: A file has changed since it was read, or may not be written. No file is changed then.
    """
    contents = {file: _read_unchanged(file, digest) for file, digest in patch.digests.items()}
    texts = apply(patch, {file: decode_source(content) for file, content in contents.items()})
    for file in texts:
        if why := _reason_against(file):
            raise ProblemError(f"`{os.path.relpath(file)}` {why}; no file was changed")
    written: list[str] = []
    for file, text in texts.items():
        try:
            write_whole(file, encode_source(text))
        except SpecError as error:
            _restore(written, contents)
            raise ProblemError(f"{error.problems[0]}; no file was changed") from error
        written.append(file)


def _read_unchanged(file: str, digest: str) -> bytes:
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ProblemError(
            f"`{os.path.relpath(file)}` cannot be read: {error.strerror or error}; no file was changed"
        ) from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ProblemError(f"`{os.path.relpath(file)}` has changed since it was read; no file was changed")
    return content


def _reason_against(file: str) -> str:
    path = Path(os.path.realpath(file))
    if _INSTALLED & {*path.parts}:
        return "belongs to an installed package, and an update of the package would undo the patch"
    if not path.is_relative_to(os.path.realpath(os.curdir)):
        return "lies outside of the working folder; start gaverify in the project's folder"
    # Root may write it all the same, but somebody has asked for it to stay as it is.
    if not os.stat(path).st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(path, os.W_OK):
        return "is read-only; make it writable with `chmod u+w`"
    return ""


def _restore(files: list[str], contents: Mapping[str, bytes]) -> None:
    for file in files:
        with suppress(SpecError):
            write_whole(file, contents[file])
