"""Facts written by hand: an equivalent and a divergent run, and what probes may have seen. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gaverify.records.comparison import (
    BackwardComparison,
    Buffers,
    Comparison,
    Draws,
    ForwardComparison,
    Repeatability,
    State,
    StateChange,
)
from gaverify.records.experiment import Cause, ControlKind, ControlRun, Operation, Suspect, WeightFit
from gaverify.records.findings import Finding
from gaverify.records.outcomes import Compared, Method, NotCompared, Outcome, ParameterComparison
from gaverify.records.ranks import Collective, Engine, RankFacts, RankShares, RankTraffic, Replicas, Traffic
from gaverify.records.windows import AccumulationWindow
from gaverify.rules import findings_for

NAN = math.nan
QUARTERS = (0.25, 0.25, 0.25, 0.25)


def row(
    name: str = "0.weight",
    full: float = 2.0,
    accumulated: float = 2.0,
    difference: float = 0.0,
    why: NotCompared | None = None,
) -> ParameterComparison:
    """One parameter of norm `full`; it diverges where the difference is more than rounding, or is none at all."""
    outcome = Outcome.EQUIVALENT if difference < 1e-6 else Outcome.DIVERGENT
    return ParameterComparison(
        name, (3, 2), outcome, Method.FLOAT64_CONTROL, full, accumulated, difference, 1e-6, difference, None, why
    )


SAME = (row(), row("0.bias"))
DIFFERENT = (row(difference=1.0), row("0.bias", difference=0.5))


def record(**changes: Any) -> Comparison:
    """An equivalent run of 16 samples in 4 micro-batches that nothing is to be said about, with some changes."""
    values: dict[str, Any] = {
        "rows": SAME,
        "steps": 4,
        "batch_size": 16,
        "sizes": (4, 4, 4, 4),
        "weights": QUARTERS,
        "weighting": "uniform",
        "micro_losses": (1.0, 1.1, 0.9, 1.2),
        "method": Method.FLOAT64_CONTROL,
        "valid_targets": (4.0, 4.0, 4.0, 4.0),
        "ignored_targets": False,
        "draws": 0,
        "draws_sliced": 0,
        "draws_unaligned": {},
        "foreign_draws_differ": False,
        "identical": False,
    }
    return facts_of(**values | changes)


_PARTS: dict[str, tuple[str, str]] = {
    **{name: ("compared", name) for name in ("rows", "method", "control_failure", "precision")},
    "weights": ("window", "used"),
    "micro_losses": ("window", "losses"),
    "weight_remedy": ("window", "remedy"),
    **{name: ("window", name) for name in ("steps", "weighting", "sizes", "valid_targets", "ignored_targets", "fit")},
    "draws": ("draws", "count"),
    "draws_sliced": ("draws", "dealt"),
    "draws_unaligned": ("draws", "unaligned"),
    "foreign_draws_differ": ("draws", "foreign_differ"),
    "draw_control": ("draws", "control"),
    "draws_alone": ("draws", "difference_alone"),
    "draw_places": ("draws", "places"),
    "drift": ("buffers", "drift"),
    "causes": ("forward", "causes"),
    "forwards_agree": ("forward", "agree"),
    **{name: ("forward", name) for name in ("loss_gap", "coupling", "ruled_out")},
    "hooked": ("backward", "hooked"),
    "backward_culprit": ("backward", "culprit"),
    "backward_control": ("backward", "control"),
}
_KINDS = {
    "compared": Compared,
    "window": AccumulationWindow,
    "draws": Draws,
    "buffers": Buffers,
    "forward": ForwardComparison,
    "backward": BackwardComparison,
}


def facts_of(**values: Any) -> Comparison:
    """Facts from one flat list of names, so that a case names only what it changes."""
    parts: dict[str, dict[str, Any]] = {part: {} for part in _KINDS}
    whole = {}
    for name, value in values.items():
        part, inner = _PARTS.get(name, ("", name))
        if part:
            parts[part][inner] = value
        else:
            whole[name] = value
    return Comparison(**whole, **{part: kind(**parts[part]) for part, kind in _KINDS.items()})


def divergent(**changes: Any) -> Comparison:
    """A divergent run that was looked into; nothing was found, but for the changes."""
    values: dict[str, Any] = {
        "rows": DIFFERENT,
        "diagnosed": True,
        "repeatability": Repeatability(0.0, 0.0),
        "state": State(()),
        "fit": WeightFit(QUARTERS, 0.4, True, noise=0.5),
        "left": 0.4,
        "loss_gap": 0.1,
    }
    return record(**values | changes)


def judged(measured: Comparison) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in findings_for(measured)]


def only(measured: Comparison) -> Finding:
    (finding,) = findings_for(measured)
    return finding


def evidence(finding: Finding, label: str) -> str:
    return "; ".join(entry.statement for entry in finding.evidence if entry.label == label)


NORM = Operation("native_batch_norm", "1", "BatchNorm1d")
LINE = Operation("mm", None, "", file="train.py", line=12, source="logits = a @ b.T")
HELPED = ControlRun("`1` in evaluation mode", 1e-16, True, kind=ControlKind.EVALUATION_MODE)
HALVED = ControlRun("`1` in evaluation mode", 0.1, False, kind=ControlKind.EVALUATION_MODE)


def cause(
    operation: Operation = NORM,
    control: ControlRun | None = HELPED,
    remedies: tuple[ControlRun, ...] = (),
    **changes: Any,
) -> Cause:
    values: dict[str, Any] = {
        "kind": "rows",
        "operation": operation,
        "source": None,
        "difference": 0.3,
        "samples": 16,
        "in_model": True,
        "statistics": False,
    }
    return Cause(Suspect(**values | changes), control, remedies, 1.0 if control is HELPED else 0.75)


def norm(**changes: Any) -> Cause:
    return cause(statistics=True, **changes)


CACHED = ControlRun("cached gradients", 1e-16, True, kind=ControlKind.CACHED_GRADIENTS)


def coupled(kind: str = "matrix", **changes: Any) -> Cause:
    values = {"operation": LINE, "in_model": False, "control": CACHED}
    return cause(kind=kind, **values | changes)


def fitted(*weights: float, residual: float = 1e-16, left: float = 1e-16, **changes: Any) -> dict[str, Any]:
    """Facts of a run in which these weights are right."""
    run = ControlRun("with these weights", left, left < 1e-6)
    return {"fit": WeightFit(weights, residual, **{"determined": True, **changes}), "weight_remedy": run, "left": left}


def changed(*places: str, control: ControlRun | None = HELPED, restored: bool = False, **changes: Any) -> State:
    found = tuple(StateChange(f"1.{place}", place, **changes) for place in places)  # type: ignore[arg-type]
    return State(found, control, found if control else (), (HELPED,) if restored else ())


MISSING = row("0.bias", accumulated=NAN, difference=NAN, why=NotCompared.MISSING_IN_ACCUMULATED)
BROKEN = row("0.bias", accumulated=NAN, difference=NAN, why=NotCompared.NOT_FINITE_IN_ACCUMULATED)
UNDECIDED = BROKEN._replace(outcome=Outcome.INCONCLUSIVE, why=NotCompared.NOT_FINITE_IN_BOTH)
UNEXPLAINED = [("GAV000", "note")]


REDUCED = Traffic({Collective.REDUCE: 1}, 100)
GATHERED = Traffic({Collective.GATHER: 1}, 10)
HALVES = (0.5, 0.5)


def fit(
    right: tuple[float, ...] = HALVES, residual: float = 1e-7, factor: float = math.nan, left: float = 0.5
) -> WeightFit:
    return WeightFit(right, residual, True, used=HALVES, used_residual=1e-7, factor=factor, factor_residual=left)


_RANK_PARTS = {
    "apart": ("replicas", "difference"),
    "summed_apart": ("replicas", "summed_difference"),
    "started_apart": ("replicas", "starting_difference"),
    "names_apart": ("replicas", "parameters"),
    "buffers_apart": ("replicas", "buffers"),
    "fed_alike": ("replicas", "fed_alike"),
    "reduced": ("reduction", "bytes_by_pass"),
    **{name: ("reduction", name) for name in ("update_bytes", "stepped_without", "altered")},
    "own": ("traffic", "own"),
    **{name: ("shares", name) for name in ("mean_left", "shards", "targets")},
}


def ranks(weights: WeightFit | None, **changes: Any) -> RankFacts:
    """Two ranks whose gradient is wrong; the names of all fields stand in one flat list, as for `facts_of`."""
    comparison = RankFacts(
        2,
        Engine.DDP,
        0.5,
        divergent=True,
        from_one_process=0.5,
        replicas=Replicas(0.0),
        traffic=RankTraffic(REDUCED),
        shares=RankShares(weights),
    )
    for name, value in changes.items():
        part, inner = _RANK_PARTS.get(name, ("", name))
        change = {inner: value}
        comparison = replace(comparison, **{part: replace(getattr(comparison, part), **change)} if part else change)
    return comparison
