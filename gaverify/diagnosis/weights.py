"""GAV201 and GAV202: the loss is additive over samples, but its micro-batches are weighted wrongly."""

from __future__ import annotations

import math

from gaverify.diagnosis.measurements import Measurements
from gaverify.results import Evidence, Finding

_RESIDUAL = 1e-6  # float64 fits of additive losses leave 1e-12 or less, coupled ones more than 1e-4


def wrong_loss_scale(measured: Measurements) -> Finding | None:
    """GAV201: accumulated = constant × full, the same constant for every parameter."""
    factor, left = measured.scale
    if not (measured.divergent and measured.comparable) or not left < _residual(measured) or abs(factor - 1) < 1e-9:
        return None
    steps = measured.steps
    known = {"K: the loss was not divided by K": float(steps), "1/K: the loss was divided twice": 1.0 / steps}
    name = next((text for text, value in known.items() if math.isclose(factor, value, rel_tol=1e-5)), "")
    meaning = f" = {name}" if name else ""
    right = ", ".join(f"{weight / factor:.4g}" for weight in measured.weights)
    return Finding(
        "GAV201", "wrong-loss-scale", "fault",
        f"the accumulated gradient is {factor:.6g} times the full-batch gradient{meaning}",
        evidence=(
            Evidence("micro-batch-weights", "measured",
                     f"{measured.largest}; one factor for all parameters leaves {left:.0e} of the gradient over",
                     {"factor": factor, "residual": left}),
        ),
        remedy=f"multiply each micro-batch's loss by {1 / factor:.6g} more (weights {right})",
        proven=True,
    )  # fmt: skip


def mean_of_means(measured: Measurements) -> Finding | None:
    """GAV202: other micro-batch weights give the full-batch gradient exactly."""
    fit = measured.fit
    if fit is None or not fit.residual < _residual(measured) or wrong_loss_scale(measured) is not None:
        return None
    meaning = _meaning(measured, fit.weights)
    weights = ", ".join(f"{weight:.4g}" for weight in fit.weights)
    used = ", ".join(f"{weight:.4g}" for weight in measured.weights)
    return Finding(
        "GAV202", "mean-of-means", "fault",
        "micro-batches of unequal weight are averaged " + ("equally" if measured.weighting == "uniform" else "wrongly"),
        evidence=(
            Evidence("micro-batch-weights", "measured", f"{measured.largest} with weights {used}", {}),
            Evidence("micro-batch-weights", "control",
                     f"weights {weights} leave {fit.residual:.0e} of the gradient over{meaning}",
                     {"weights": list(fit.weights), "residual": fit.residual, "determined": fit.determined}),
        ),
        remedy=_remedy(measured, fit.weights), proven=fit.determined,
    )  # fmt: skip


def _residual(measured: Measurements) -> float:
    """What rounding leaves over of a fit: far less in float64 than where no control was possible."""
    return _RESIDUAL if measured.method == "float64-control" else 1e-3


def _shares(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(value / sum(values) for value in values) if values and sum(values) > 0 else ()


def _is(fitted: tuple[float, ...], shares: tuple[float, ...]) -> bool:
    return len(shares) == len(fitted) and all(
        math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in zip(fitted, shares, strict=True)
    )


def _meaning(measured: Measurements, fitted: tuple[float, ...]) -> str:
    if _is(fitted, _shares(measured.valid_targets)):
        return ": the shares of valid targets"
    if _is(fitted, _shares(tuple(float(size) for size in measured.sizes))):
        return ": the shares of samples"
    return ""


def _remedy(measured: Measurements, fitted: tuple[float, ...]) -> str:
    meaning = _meaning(measured, fitted)
    if "valid targets" in meaning:
        return "weight each micro-batch by its share of the window's valid targets: --weighting tokens"
    if "samples" in meaning:
        return "weight each micro-batch by n_k/N: --weighting samples"
    return "multiply the micro-batch losses by " + ", ".join(f"{weight:.6g}" for weight in fitted)
