"""Measurements written by hand: an equivalent and a divergent run, and what probes may have seen. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from gaverify.diagnosis import findings_for
from gaverify.measurements import (
    Cause,
    ControlRun,
    Measurements,
    Operation,
    Repeatability,
    StateChange,
    StateProbe,
    Suspect,
    WeightFit,
)
from gaverify.results import Finding, Outcome, ParameterComparison

NAN = math.nan
QUARTERS = (0.25, 0.25, 0.25, 0.25)


def row(name: str = "0.weight", full: float = 2.0, accumulated: float = 2.0, difference: float = 0.0,
        reason: str = "") -> ParameterComparison:  # fmt: skip
    """One parameter of norm `full`; it diverges where the difference is more than rounding, or is none at all."""
    outcome = Outcome.EQUIVALENT if difference < 1e-6 else Outcome.DIVERGENT
    return ParameterComparison(
        name, (3, 2), outcome, "float64-control", full, accumulated, difference, 1e-6, difference, None, reason
    )


SAME = (row(), row("0.bias"))
DIFFERENT = (row(difference=1.0), row("0.bias", difference=0.5))


def record(**changes: Any) -> Measurements:
    """An equivalent run of 16 samples in 4 micro-batches that nothing is to be said about, with some changes."""
    values: dict[str, Any] = {
        "rows": SAME, "steps": 4, "batch_size": 16, "sizes": (4, 4, 4, 4), "weights": QUARTERS, "weighting": "uniform",
        "micro_losses": (1.0, 1.1, 0.9, 1.2), "method": "float64-control", "valid_targets": (4.0, 4.0, 4.0, 4.0),
        "ignored_targets": False, "draws": 0, "draws_sliced": 0, "draws_unaligned": {}, "foreign_draws_differ": False,
        "identical": False,
    }  # fmt: skip
    return Measurements(**values | changes)


def divergent(**changes: Any) -> Measurements:
    """A divergent run that was looked into; nothing was found, but for the changes."""
    values: dict[str, Any] = {
        "rows": DIFFERENT, "diagnosed": True, "repeatability": Repeatability(0.0, 0.0), "state": StateProbe(()),
        "fit": WeightFit(QUARTERS, 0.4, True, noise=0.5), "left": 0.4, "loss_gap": 0.1,
    }  # fmt: skip
    return record(**values | changes)


def judged(measured: Measurements) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in findings_for(measured)]


def only(measured: Measurements) -> Finding:
    (finding,) = findings_for(measured)
    return finding


def evidence(finding: Finding, label: str) -> str:
    return "; ".join(entry.statement for entry in finding.evidence if entry.label == label)


NORM = Operation("native_batch_norm", "1", "BatchNorm1d")
LINE = Operation("mm", None, "", file="train.py", line=12, source="logits = a @ b.T")
HELPED = ControlRun("`1` frozen", 1e-16, True)
HALVED = ControlRun("`1` frozen", 0.1, False)


def cause(operation: Operation = NORM, control: ControlRun | None = HELPED, remedies: tuple[ControlRun, ...] = (),
          **changes: Any) -> Cause:  # fmt: skip
    values: dict[str, Any] = {
        "kind": "rows", "operation": operation, "source": None, "difference": 0.3, "samples": 16, "in_model": True,
        "statistics": False,
    }  # fmt: skip
    return Cause(Suspect(**values | changes), control, remedies, 1.0 if control is HELPED else 0.75)


def norm(**changes: Any) -> Cause:
    return cause(statistics=True, **changes)


def coupled(kind: str = "matrix", **changes: Any) -> Cause:
    values = {"operation": LINE, "in_model": False, "control": ControlRun("cached gradients", 1e-16, True)}
    return cause(kind=kind, **values | changes)


def fitted(*weights: float, residual: float = 1e-16, left: float = 1e-16, **changes: Any) -> dict[str, Any]:
    """Measurements of a run in which these weights are right."""
    run = ControlRun("with these weights", left, left < 1e-6)
    return {"fit": WeightFit(weights, residual, **{"determined": True, **changes}), "weight_remedy": run, "left": left}


def changed(*places: str, control: ControlRun | None = HELPED, restored: bool = False, **changes: Any) -> StateProbe:
    found = tuple(StateChange(f"1.{place}", place, True, **changes) for place in places)  # type: ignore[arg-type]
    return StateProbe(found, control, found if control else (), (HELPED,) if restored else ())


MISSING = row("0.bias", accumulated=NAN, difference=NAN, reason="no gradient (None) in the accumulated run only")
BROKEN = row("0.bias", accumulated=NAN, difference=NAN, reason="not finite in the accumulated run")
UNDECIDED = BROKEN._replace(outcome=Outcome.INCONCLUSIVE, reason="not finite in both runs")
UNEXPLAINED = [("GAV000", "note")]
