"""Which patches may repair the findings of an audit, the likeliest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gaverify.patches.sources import Context
from gaverify.records.findings import Finding
from gaverify.records.patch import Patch


def propose(findings: Sequence[Finding], context: Context) -> Iterator[Patch]:
    """Yields patches that may repair the proven faults, the likeliest first; none where the shape is unknown."""
    yield from ()
