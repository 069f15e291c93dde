"""GAV102 cross-sample-operation."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.diagnosis.wording import control, first_operation, module_name, proven
from gaverify.measurements import Measurements
from gaverify.results import Finding

CODE, NAME = "GAV102", "cross-sample-operation"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding per operation inside the model that mixes samples."""
    for cause in measured.causes:
        suspect = cause.suspect
        if not suspect.in_model or suspect.statistics or suspect.kind == "random":
            continue
        operation = suspect.culprit
        what = "takes another way for another batch" if suspect.kind == "control-flow" else "mixes the samples of a batch"
        yield Finding(
            CODE, NAME, "fault", f"{module_name(operation.module, operation.kind)} {what}",
            location=operation.location,
            evidence=(first_operation(measured, cause), *control(measured, cause)),
            remedy="let the operation see one sample at a time, or statistics that do not depend on the micro-batch",
            proven=proven(measured, cause),
        )  # fmt: skip
