"""GAV202 mean-of-means."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.diagnosis.empty_micro_batch import explains_weights
from gaverify.diagnosis.wording import tested
from gaverify.diagnosis.wrong_loss_scale import factor_of
from gaverify.measurements import Measurements, are_shares
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV202", "mean-of-means"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where other micro-batch weights give the full-batch gradient exactly."""
    fit, run = measured.fit, measured.weight_remedy
    if fit is None or run is None or factor_of(measured)[0] is not None or explains_weights(measured):
        return
    meaning, remedy = _meaning(measured, fit.weights)
    weights = ", ".join(f"{weight:.4g}" for weight in fit.weights)
    used = ", ".join(f"{weight:.4g}" for weight in measured.weights)
    evenly = "equally" if measured.weighting == "uniform" else "wrongly"
    unsure = "" if fit.determined else " (other weights fit as well: these micro-batches cannot tell them apart)"
    yield Finding(
        CODE, NAME, "fault", f"micro-batches of unequal weight are averaged {evenly}",
        evidence=(
            Evidence("micro-batch-weights", "measured", f"{measured.largest} with weights {used}",
                     {"used": list(measured.weights)}),
            Evidence("micro-batch-weights", "control",
                     f"with weights {weights} the difference is {run.left:.0e}{': proven' if run.rounding else ''}"
                     f"{meaning}{unsure}",
                     {"weights": list(fit.weights), "residual": fit.residual, "determined": fit.determined}),
        ),
        remedy=remedy + (f": {tested(run)}" if run.rounding else ""), proven=run.rounding,
    )  # fmt: skip


def _meaning(measured: Measurements, fitted: tuple[float, ...]) -> tuple[str, str]:
    """What the fitted weights are, and how to ask for them."""
    if are_shares(fitted, measured.valid_targets):
        return (
            "; they are the shares of valid targets",
            "weight each micro-batch by its share of the window's valid targets (--weighting tokens)",
        )
    if are_shares(fitted, tuple(map(float, measured.sizes))):
        return "; they are the shares of samples n_k/N", "weight each micro-batch by n_k/N (--weighting samples)"
    weights = ", ".join(f"{weight:.6g}" for weight in fitted)
    return "", f"multiply the micro-batch losses by {weights}"
