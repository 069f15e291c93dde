"""GAV201 wrong-loss-scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.diagnosis.wording import tested
from gaverify.measurements import Measurements, is_constant
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV201", "wrong-loss-scale"
_RESIDUAL = {True: 1e-6, False: 1e-3}  # of a fit in float64, and where no float64 control was possible


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where one factor for all parameters and micro-batches makes the gradients agree."""
    factor, left = factor_of(measured)
    if factor is None or abs(factor - 1) < 1e-7:
        return
    steps = measured.steps
    known = (
        (float(steps), "K: the loss was not divided by K"),
        (1.0 / steps, "1/K: the loss was divided by K although it needs no division, or twice"),
        (steps / measured.batch_size, "K/B"), (measured.batch_size / steps, "B/K"),
        (1.0 / measured.batch_size, "1/B"), (float(measured.batch_size), "B"),
    )  # fmt: skip
    meaning = next((f" = {text}" for value, text in known if math.isclose(factor, value, rel_tol=1e-5)), "")
    right = ", ".join(f"{weight / factor:.4g}" for weight in measured.weights)
    run = measured.weight_remedy
    yield Finding(
        CODE, NAME, "fault", f"the accumulated gradient is {factor:.6g} times the full-batch gradient{meaning}",
        evidence=(
            Evidence("micro-batch-weights", "measured",
                     f"{measured.largest}; one factor for all parameters leaves {left:.0e} of the gradient over",
                     {"factor": factor, "residual": left}),
            *((Evidence("micro-batch-weights", "control",
                        f"with weights {right} the difference is {run.left:.0e}: proven" if run.rounding
                        else f"with weights {right} a difference of {run.left:.0e} is left", {"left": run.left}),)
              if run is not None else ()),
        ),
        remedy=f"multiply each micro-batch's loss by {1 / factor:.6g} (weights {right})"
        + (f": {tested(run)}" if run is not None and run.rounding else ""),
        proven=run is None or run.rounding,
    )  # fmt: skip


def factor_of(measured: Measurements) -> tuple[float | None, float]:
    """Returns the factor in accumulated = factor · full and what it leaves over; None where there is no such factor."""
    if not (measured.divergent and measured.comparable):
        return None, math.inf
    accurate = _RESIDUAL[measured.method in ("float64-control", "tolerance")]
    fit = measured.fit
    if fit is not None and (measured.weight_remedy is not None):
        ratios = [w / c for w, c in zip(measured.weights, fit.weights, strict=True) if c]
        if len(ratios) == len(fit.weights) and is_constant(ratios):
            return ratios[0], fit.residual
        return None, math.inf
    factor, left = measured.scale
    return (factor, left) if not measured.diagnosed and left < accurate else (None, math.inf)
