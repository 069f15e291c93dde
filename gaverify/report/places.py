"""Where a finding lies as tools outside Python need it: a path relative to the repository, and a line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gaverify.records.findings import Finding
from gaverify.report.stories import Story
from gaverify.tracebacks import repository_of


@dataclass(frozen=True)
class Place:
    """A line of a file; `inside` says whether the file lies in the repository, and `path` is relative to its root then.

    `text` is the line as it stood when the finding was made, "" where it was not read.
    """

    path: str
    line: int
    inside: bool
    text: str = ""


def place_of(finding: Finding | None, story: Story) -> Place | None:
    """Returns the finding's own line; else the first line of the file that says what was run; None without any file.

    A pull request shows an annotation only at a file, and the spec or script is where a reader goes on from.
    """
    location = finding.location if finding is not None else None
    if location is not None and location.file:
        text = location.excerpt.line(location.line) if location.excerpt is not None else ""
        return _place(location.file, location.line or 1, text)
    return next((_place(file, 1, "") for file in _files(story) if os.path.isfile(file)), None)


def _files(story: Story) -> Iterator[str]:
    yield from filter(None, (story.source, story.model.rpartition(":")[0]))


def _place(file: str, line: int, text: str) -> Place:
    path = Path(os.path.abspath(file))
    root = repository_of(path.parent) or Path.cwd()
    if path.is_relative_to(root):
        return Place(path.relative_to(root).as_posix(), line, True, text)
    return Place(path.as_posix(), line, False, text)
