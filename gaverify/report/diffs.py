"""Unified diffs of patches: those of a report, and the lines that each of their changes replaces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from gaverify.report.pages import Report

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class Change(NamedTuple):
    """Lines of a file, and the lines that stand in their place afterwards."""

    path: str
    """Path of the file, as the diff names it."""
    first: int
    """Number of the first line before the change."""
    last: int
    """Number of the last line before the change."""
    lines: tuple[str, ...]
    """The new lines, without their ends."""


def diffs_of(report: Report) -> list[str]:
    """Returns the diffs of all answers. Two specs may have the same one, which can be applied only once."""
    patches = (answer.patch for answer in report.answers)
    return list(dict.fromkeys(patch.diff for patch in patches if patch is not None))


def changes_of(diff: str) -> Iterator[Change]:
    """Yields what a unified diff replaces; new lines alone come with the line in front of them, else behind them."""
    path, old_left, new_left, hunk = "", 0, 0, list[str]()
    first = 0
    # Not `splitlines`, which also splits at form feeds inside a line.
    for line in diff.split("\n"):
        if old_left or new_left:  # a removed line may itself begin with `--`
            hunk.append(line)
            old_left -= line[:1] in ("-", " ")
            new_left -= line[:1] in ("+", " ")
            if not (old_left or new_left):
                yield from _changes_of_hunk(path, first, hunk)
        elif line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/").rstrip("\r\t")
        elif header := _HUNK.match(line):
            first, hunk = int(header[1]), []
            old_left, new_left = (int(1 if count is None else count) for count in header.groups()[1:])


def _changes_of_hunk(path: str, first: int, hunk: Iterable[str]) -> Iterator[Change]:
    # A remark that a file has no last line end is none of its lines.
    lines = [line.rstrip("\r") for line in hunk if line[:1] in ("-", "+", " ")]
    groups = [(same, list(group)) for same, group in groupby(lines, key=lambda line: line.startswith(" "))]
    for at, (same, group) in enumerate(groups):
        old = [line for line in group if not line.startswith("+")]
        new = [line[1:] for line in group if line.startswith("+")]
        if not same and old:
            yield Change(path, first, first + len(old) - 1, tuple(new))
        elif not same and at:  # a review comment has to lie on a line of the file
            yield Change(path, first - 1, first - 1, (groups[at - 1][1][-1][1:], *new))
        elif not same:
            behind = [line[1:] for line in groups[1][1][:1]] if len(groups) > 1 else []
            yield Change(path, first, first, (*new, *behind))
        first += len(old)
