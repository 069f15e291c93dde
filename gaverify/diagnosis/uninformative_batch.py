"""GAV901 uninformative-batch."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV901", "uninformative-batch"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a note where one micro-batch, identical samples, zero gradients or equal counts could hide a fault."""
    reasons = []
    if measured.steps == 1:
        reasons.append("K = 1: the full batch was compared with itself")
    if measured.identical:
        reasons.append("all samples are identical, so that samples acting on each other could not show")
    if all(not row.reference_norm > 0 and not row.accumulated_norm > 0 for row in measured.rows):
        reasons.append("every gradient is zero")
    counts = measured.valid_targets
    equal = bool(counts) and len(set(counts)) == 1 and len(counts) > 1
    if measured.ignored_targets and equal and measured.weighting == "uniform" and not measured.divergent:
        reasons.append(
            f"every micro-batch has {counts[0]:g} valid targets: averaging them equally is right on this batch only"
        )
    if not reasons:
        return
    yield Finding(
        CODE, NAME, "note", "; ".join(reasons),
        evidence=(Evidence("batch-quality", "measured", "; ".join(reasons), {"valid_targets": list(counts)}),),
        remedy="verify on a batch of different samples with different numbers of valid targets", proven=True,
    )  # fmt: skip
