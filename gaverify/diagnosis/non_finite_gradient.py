"""GAV503 non-finite-gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.diagnosis.empty_micro_batch import empty_micro_batches
from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding, Location, Outcome

CODE, NAME = "GAV503", "non-finite-gradient"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where a gradient is NaN or infinite on either side, and no empty micro-batch is to blame."""
    rows = [row for row in measured.rows if math.isnan(row.difference_norm) and row.reason.startswith("not finite")]
    if not rows or (empty_micro_batches(measured) and measured.divergent):
        return
    divergent = any(row.outcome is Outcome.DIVERGENT for row in rows)
    where = f"`{rows[0].name}`" + (f" and {len(rows) - 1} more parameters" if len(rows) > 1 else "")
    yield Finding(
        CODE, NAME, "fault" if divergent else "note", f"the gradient of {where} is {rows[0].reason}",
        location=Location(rows[0].name.rpartition(".")[0]),
        evidence=(Evidence("comparison", "measured", f"{len(rows)} parameters are not finite",
                           {"parameters": [row.name for row in rows]}),),
        remedy="look for divisions by zero, logarithms of zero, and overflow in low precision", proven=True,
    )  # fmt: skip
