"""GAV101 batch-statistics."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.diagnosis.wording import control, first_operation, module_name, proven, tested
from gaverify.measurements import Measurements
from gaverify.results import Finding

CODE, NAME = "GAV101", "batch-statistics"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding per cause in which a module normalises its channels by statistics of the batch."""
    for cause in measured.causes:
        suspect = cause.suspect
        if not (suspect.statistics and suspect.in_model):
            continue
        operation = suspect.culprit
        remedies = [f"{run.what} in its place: {tested(run)}" for run in cause.remedies if run.rounding]
        if cause.control is not None and "frozen" in cause.control.what:
            remedies.append("freeze its statistics (`.eval()` on the layer, after every `model.train()`)")
        yield Finding(
            CODE, NAME, "fault",
            f"{module_name(operation.module, operation.kind)} normalises over the micro-batch",
            location=operation.location,
            evidence=(first_operation(measured, cause), *control(measured, cause)),
            remedy="; or ".join(remedies) or "use statistics that do not depend on the micro-batch: per sample, or stored",
            proven=proven(measured, cause),
        )  # fmt: skip
