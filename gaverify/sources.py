"""The lines around a finding, read from the user's file while it still is what ran."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from dataclasses import replace

from gaverify.records.findings import Excerpt, Finding, Location

_AROUND = 4
"""Lines before and behind: enough to see the statement, few enough to read."""

_WIDEST = 300
"""Characters of a line that are kept: generated code has lines of megabytes."""


def with_excerpts(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns the findings, each with the lines around its place where that is a file that can be read."""
    return tuple(
        finding if finding.location is None else replace(finding, location=_read(finding.location))
        for finding in findings
    )


def _read(location: Location) -> Location:
    if location.file is None or location.line is None or location.excerpt is not None:
        return location
    linecache.checkcache(location.file)
    lines = linecache.getlines(location.file)  # in the encoding that the file declares; [] where there is none
    if not 1 <= location.line <= len(lines):
        return location
    first = max(location.line - _AROUND, 1)
    excerpt_lines = lines[first - 1 : location.line + _AROUND]
    return replace(location, excerpt=Excerpt(first, tuple(line.rstrip()[:_WIDEST] for line in excerpt_lines)))
