"""GAV103 batch-coupled-loss."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.diagnosis.wording import control, first_operation, proven
from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV103", "batch-coupled-loss"
_WHAT = {
    "matrix": "the loss compares the samples of a batch with each other",
    "rows": "the loss gives each sample a value that depends on the other samples",
    "non-additive": "the loss is not a weighted sum over samples",
    "control-flow": "the loss is computed in another way for another batch",
}


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding per operation outside the model's outputs that couples samples."""
    for cause in measured.causes:
        suspect = cause.suspect
        if suspect.in_model or suspect.kind not in _WHAT:
            continue
        fit = measured.fit
        evidence = [first_operation(measured, cause)]
        if fit is not None and fit.residual > 1e-6:
            text = f"the best micro-batch weights leave {fit.residual:.1e} of the gradient over"
            evidence.append(Evidence("micro-batch-weights", "fit", text, {"residual": fit.residual}))
        cached = cause.control is not None and cause.control.what == "cached gradients" and cause.control.rounding
        remedy = "compute the batch's statistics once per window and hold them constant in every micro-batch"
        if cached:
            remedy = (
                "a two-pass cached gradient (`gaverify.remedies.CachedGradients`): tested, gives the full-batch "
                "gradient at the memory of a micro-batch"
            )
        yield Finding(
            CODE, NAME, "fault", _WHAT[suspect.kind], location=suspect.culprit.location,
            evidence=(*evidence, *control(measured, cause)), remedy=remedy,
            proven=proven(measured, cause),
        )  # fmt: skip
