"""GAV203 empty-micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.measurements import Measurements, is_constant
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV203", "empty-micro-batch"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where a micro-batch without valid targets gives NaN or drops out of the mean."""
    empty = empty_micro_batches(measured)
    if not empty or not measured.divergent:
        return
    which = ", ".join(str(k + 1) for k in empty)
    lost = [k for k in empty if not math.isfinite(measured.micro_losses[k])]
    effect = "its mean loss is 0/0" if lost else "it takes a share of the mean and adds nothing"
    rows = [row for row in measured.rows if math.isnan(row.difference_norm) and row.reason.startswith("not finite")]
    shown = f"gradients {rows[0].reason}: `{rows[0].name}`" if rows else measured.largest
    yield Finding(
        CODE, NAME, "fault", f"micro-batch {which} of {measured.steps} has no valid target: {effect}",
        evidence=(
            Evidence("micro-batch-weights", "measured",
                     f"{shown}; valid targets per micro-batch: {', '.join(f'{n:g}' for n in measured.valid_targets)}",
                     {"valid_targets": list(measured.valid_targets)}),
        ),
        remedy="divide the summed loss by the valid targets of the whole window, which is never zero",
        proven=True,
    )  # fmt: skip


def empty_micro_batches(measured: Measurements) -> list[int]:
    """Returns the positions of micro-batches whose loss counted no target."""
    return [k for k, count in enumerate(measured.valid_targets) if not count > 0]


def explains_weights(measured: Measurements) -> bool:
    """Whether empty micro-batches are all that is wrong with the weights: the others have equal ones."""
    empty = empty_micro_batches(measured)
    if not empty or measured.fit is None:
        return False
    return is_constant([c for k, c in enumerate(measured.fit.weights) if k not in empty])
