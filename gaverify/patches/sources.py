"""The user's files as text: read with digests, edited by spans, shown as a diff.

Everything that no edit touches stays: line ends, encoding, a byte-order mark.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gaverify.errors import ProblemError
from gaverify.records.audit import Record
from gaverify.records.events import Backward
from gaverify.records.patch import Edit, Patch
from gaverify.tracebacks import Owner, owner_of

# `str.splitlines` also ends lines at form feeds and other characters that Python's parser does not.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


@dataclass(frozen=True)
class Source:
    """A file of the user's."""

    text: str
    """Its text, with its own line ends."""
    digest: str
    """SHA-256 of its bytes."""


@dataclass(frozen=True)
class Context:
    """An audit's record and the sources that a patch may change."""

    script: str
    """Absolute path of the script."""
    record: Record
    """Calls with their lines, and how the updates differ."""
    sources: Mapping[str, Source]
    """The script and the user's files that its calls come from, by absolute path."""


def read_context(script: str, record: Record) -> Context:
    """Reads the script and the user's files in which the record's calls lie; leaves out what Python cannot read."""
    windows = (*record.calls.windows, *record.calls.full_windows)
    files = {event.file for window in windows for event in window.events if event.file is not None}
    files |= {line[0] for window in windows for event in window.of(Backward) if (line := event.origin.made)}
    if record.controls.loss_line is not None:
        files.add(record.controls.loss_line[0])
    # Only the user's own code is changed: neither packages nor the standard library.
    paths = {os.path.realpath(file) for file in files if owner_of(file) is Owner.USER}
    paths.add(os.path.realpath(script))
    sources = {}
    for path in sorted(paths):
        try:
            raw = Path(path).read_bytes()
            sources[path] = Source(decode_source(raw), hashlib.sha256(raw).hexdigest())
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue
    return Context(os.path.realpath(script), record, sources)


def decode_source(raw: bytes) -> str:
    """Returns the text of a source as Python decodes it; its line ends and a byte-order mark stay.

    Raises:
        UnicodeDecodeError: It is not in the encoding that it declares.
        SyntaxError: There is no such encoding.
    """
    return raw.decode(_encoding_of(raw))


def encode_source(text: str) -> bytes:
    """Returns the bytes of a source in the encoding that it declares."""
    return text.encode(_encoding_of(text.encode()))


def _encoding_of(raw: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return "utf-8" if encoding == "utf-8-sig" else encoding  # the mark stays a character of the text


def split_lines(text: str) -> list[str]:
    """Returns the lines of a text as Python's parser counts them, with their ends."""
    return _LINE.findall(text)


def apply(patch: Patch, text_by_file: Mapping[str, str]) -> dict[str, str]:
    """Returns the texts of the files that a patch changes, changed.

    Raises:
        ProblemError: Two edits overlap.
    """
    files = dict.fromkeys(edit.file for edit in patch.edits)
    return {file: edit_text(text_by_file[file], [e for e in patch.edits if e.file == file]) for file in files}


def edit_text(text: str, edits: Iterable[Edit]) -> str:
    """Returns a text with its edits.

    Raises:
        ProblemError: Two edits overlap.
    """
    lines = split_lines(text)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    ordered = sorted(edits, key=lambda edit: edit.span)  # stable: insertions at one place keep their order
    if any(before.span[1] > after.span[0] for before, after in pairwise(ordered)):
        raise ProblemError("two edits of a patch overlap")
    for edit in reversed(ordered):
        (first_line, first_column), (last_line, last_column) = edit.span
        first, last = starts[first_line - 1] + first_column, starts[last_line - 1] + last_column
        text = text[:first] + edit.text + text[last:]
    return text


def render_diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Returns the unified diff of texts by file, with paths relative to the working folder."""
    parts: list[str] = []
    for file, text in after.items():
        path = os.path.relpath(file).replace(os.sep, "/")
        path = path if not path.startswith("../") else file.lstrip("/")
        lines = difflib.unified_diff(
            split_lines(before[file]), split_lines(text), f"a/{path}", f"b/{path}", lineterm="\n"
        )
        for line in lines:
            # A last line without an end would run into the next one.
            parts.append(line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)
