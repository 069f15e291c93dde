"""GAV502 and GAV503: gradients that are missing or not finite."""

from __future__ import annotations

import math

from gaverify.diagnosis.measurements import Measurements
from gaverify.results import Evidence, Finding, Outcome


def missing_gradient(measured: Measurements) -> Finding | None:
    """GAV502: a parameter has a gradient in one of the runs only."""
    rows = [row for row in measured.rows if row.reason.startswith("no gradient (None)")]
    if not rows:
        return None
    names = ", ".join(f"`{row.name}`" for row in rows[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
    return Finding(
        "GAV502", "missing-gradient", "fault", f"{names}: {rows[0].reason}",
        evidence=(Evidence("comparison", "measured", f"{len(rows)} parameters have a gradient in one run only",
                           {"parameters": [row.name for row in rows]}),),
        remedy="make every micro-batch use the same parameters, or add their output times zero to the loss",
        proven=True,
    )  # fmt: skip


def non_finite_gradient(measured: Measurements) -> Finding | None:
    """GAV503 (GAV203 where a micro-batch has no valid target): NaN or infinity in a gradient."""
    rows = [row for row in measured.rows if row.reason.startswith("not finite")]
    lost = [k for k, loss in enumerate(measured.micro_losses) if not math.isfinite(loss)]
    if not rows:
        return None
    values = {"parameters": [row.name for row in rows], "micro_batches": [k + 1 for k in lost]}
    where = f"`{rows[0].name}`" + (f" and {len(rows) - 1} more parameters" if len(rows) > 1 else "")
    empty = [k for k in lost if measured.valid_targets and not measured.valid_targets[k] > 0]
    if empty:
        which = ", ".join(str(k + 1) for k in empty)
        return Finding(
            "GAV203", "empty-micro-batch", "fault",
            f"micro-batch {which} of {measured.steps} has no valid target: its mean loss is 0/0",
            evidence=(Evidence("comparison", "measured", f"gradients {rows[0].reason}: {where}", values),),
            remedy="divide the summed loss by the valid targets of the whole window, which is never zero",
            proven=True,
        )  # fmt: skip
    divergent = any(row.outcome is Outcome.DIVERGENT for row in rows)
    return Finding(
        "GAV503", "non-finite-gradient", "fault" if divergent else "note", f"the gradient of {where} is {rows[0].reason}",
        evidence=(Evidence("comparison", "measured", f"{len(rows)} parameters are not finite", values),),
        remedy="look for divisions by zero, logarithms of zero, and overflow in low precision", proven=True,
    )  # fmt: skip
