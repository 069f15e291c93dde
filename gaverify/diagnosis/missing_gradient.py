"""GAV502 missing-gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding, Location

CODE, NAME = "GAV502", "missing-gradient"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where a parameter has a gradient on one side only."""
    rows = [row for row in measured.rows if math.isnan(row.difference_norm) and row.reason.startswith("no gradient")]
    if not rows:
        return
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    yield Finding(
        CODE, NAME, "fault", f"`{rows[0].name}`{more} has {rows[0].reason}",
        location=Location(rows[0].name.rpartition(".")[0]),
        evidence=(Evidence("comparison", "measured", f"{len(rows)} parameters have a gradient on one side only",
                           {"parameters": [row.name for row in rows]}),),
        remedy="look for a branch that depends on the batch: the parameter is reached on one side only", proven=True,
    )  # fmt: skip
