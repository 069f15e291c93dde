"""Compares every update of both runs, parameter by parameter, against the noise floor of the perturbed run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from gaverify.audit.fitting import fit_weights
from gaverify.audit.floors import floors_allowed, judge, noise_of
from gaverify.audit.reading import Run
from gaverify.audit.records import RowCheck, UpdateComparison
from gaverify.audit.same_data import check_rows
from gaverify.audit.windows import Window, windows_of
from gaverify.comparison import measure
from gaverify.errors import ProblemError
from gaverify.precision import unit_roundoff
from gaverify.results import Outcome, ParameterComparison

_BUFFER_NOISE = 1e-4  # buffers that differ by less differ by rounding
_START = 64.0  # weights start equal, or moved by 2 u; as many units apart they were drawn anew
_VISIBLE = 0.5  # K = 2 forgotten or divided twice is the smallest constant factor; a floor above it hides all


def compare_updates(full: Run, perturbed: Run, accumulated: Run, updates: int) -> tuple[UpdateComparison, ...]:
    """Returns a comparison for each update that both runs made, at most `updates` of them."""
    _check_parameters(full, accumulated)
    unit = working_unit(full)
    windows = {window.number: window for window in windows_of(accumulated.events)}
    compared: list[UpdateComparison] = []
    judged = True
    for number in range(1, min(full.updates, accumulated.updates, updates) + 1):
        data = check_rows(full.rows(number), accumulated.rows(number))
        rows, noise, unrepeatable = _rows(full, perturbed, accumulated, number, unit)
        apart = _distance(full.samples(number), accumulated.samples(number), "before")
        judged = judged and data.same and not unrepeatable
        judged = judged and not apart > _start_allowed(full, perturbed, number, unit)
        outcome = Outcome.INCONCLUSIVE if unrepeatable else _outcome(rows)
        comparison = _comparison(
            full.samples(number), accumulated.samples(number), windows.get(number), rows, outcome, data, judged, number
        )
        compared.append(replace(comparison, noise=noise, started_apart=apart, unrepeatable=unrepeatable))
        judged = judged and outcome is Outcome.EQUIVALENT
    return tuple(compared)


def working_unit(run: Run) -> float:
    """Returns the unit roundoff of the coarsest arithmetic that a run trained in."""
    return float(run.meta["unit"]) or unit_roundoff(torch.float32)


def _check_parameters(full: Run, accumulated: Run) -> None:
    a, b = full.shapes, accumulated.shapes
    missing = [f"`{name}` only in the full-batch run" for name in a if name not in b]
    missing += [f"`{name}` only in the accumulated run" for name in b if name not in a]
    missing += [f"`{name}` is {list(a[name])} and {list(b[name])}" for name in a if name in b and a[name] != b[name]]
    if missing:
        shown = "; ".join(missing[:5]) + (f"; and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ProblemError(
            f"the two runs trained different parameters: {shown}; "
            "their arguments must differ only in how the batch is cut"
        )


def _rows(
    full: Run, perturbed: Run, accumulated: Run, number: int, unit: float
) -> tuple[tuple[ParameterComparison, ...], float, str]:
    """Every parameter's comparison, the noise of the whole gradient, and how the full-batch run differs from itself."""
    reference, actual = _aligned(full.gradients(number), accumulated.gradients(number))
    working = {row.name: row for row in measure(actual, reference)}
    floor = dict.fromkeys(working, 0.0)
    unrepeatable = ""
    if perturbed.updates >= number:
        reference, moved = _aligned(full.gradients(number), perturbed.gradients(number))
        floor |= {row.name: row.difference for row in measure(moved, reference) if math.isfinite(row.difference)}
        unrepeatable = _unrepeatable(full, perturbed, number, unit, noise_of(working, floor))
    rows = judge(working, floor, unit)
    decided = tuple(_open(row) if row.reason.endswith("both runs") else row for row in rows)
    return decided, noise_of(working, floor), unrepeatable


def _open(row: ParameterComparison) -> ParameterComparison:
    """A gradient that is not finite in both runs says nothing about accumulation."""
    return row._replace(outcome=Outcome.INCONCLUSIVE)


def _start_allowed(full: Run, perturbed: Run, number: int, unit: float) -> float:
    """How far weights may be apart before an update: by rounding, and what earlier updates made of that."""
    grown = 0.0
    if number > 1 and perturbed.updates >= number:
        grown = _distance(full.samples(number), perturbed.samples(number), "before")
    return max(_START * unit, floors_allowed(unit) * grown)


def _unrepeatable(full: Run, perturbed: Run, number: int, unit: float, noise: float) -> str:
    start = _distance(full.samples(number), perturbed.samples(number), "before")
    if number == 1 and start > _START * unit:
        return f"its weights start {start:.1e} apart (relative) although only rounding was added"
    if floors_allowed(unit) * noise > _VISIBLE:
        rows = check_rows(full.rows(number), perturbed.rows(number))
        seen = "" if rows.same else f", and {rows.differing} of its {rows.full} rows are others"
        return f"its gradients differ by {noise:.1e} (relative) when run again{seen}"
    return ""


def _aligned(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both under the same names: a parameter without a gradient has None."""
    names = list(dict.fromkeys([*a, *b]))
    return {name: a.get(name) for name in names}, {name: b.get(name) for name in names}


def _outcome(rows: tuple[ParameterComparison, ...]) -> Outcome:
    outcomes = {row.outcome for row in rows}
    if Outcome.DIVERGENT in outcomes:
        return Outcome.DIVERGENT
    informative = any(row.reference_norm > 0 or row.accumulated_norm > 0 for row in rows)
    return Outcome.INCONCLUSIVE if Outcome.INCONCLUSIVE in outcomes or not informative else Outcome.EQUIVALENT


def _comparison(
    full: Mapping[str, Any], accumulated: Mapping[str, Any], window: Window | None,
    rows: tuple[ParameterComparison, ...], outcome: Outcome, data: RowCheck, judged: bool, number: int,
) -> UpdateComparison:  # fmt: skip
    backwards = window.of("backward") if window is not None else ()
    forwards = window.of("forward") if window is not None else ()
    valid = tuple(max((count for count, _ in event.values.get("targets", ())), default=-1) for event in backwards)
    return UpdateComparison(
        number=number, outcome=outcome, judged=judged, parameters=rows, data=data,
        fit=fit_weights(full, accumulated), backwards=len(backwards),
        sizes=tuple(event.values.get("rows") or 0 for event in forwards),
        valid_targets=valid if valid and min(valid) >= 0 else (),
        ignored_targets=any(count < total for event in backwards for count, total in event.values.get("targets", ())),
        learning_rates=_rates(accumulated), learning_rates_full=_rates(full),
        weights_difference=_distance(full, accumulated, "weights"), drifted=_drifted(full, accumulated),
    )  # fmt: skip


def _rates(samples: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(rate for rates in samples["lrs"].values() for rate in rates)


def _distance(full: Mapping[str, Any], accumulated: Mapping[str, Any], when: str) -> float:
    """How far the weights are apart, relative, over sampled elements that stand for their share of a parameter."""
    difference = size = 0.0
    for at, weights in full[when].items():
        other = accumulated[when].get(at)
        if other is None or len(other) != len(weights):
            return math.nan
        stretch = full["stretches"][at]
        difference += float((stretch * (other - weights).square()).sum())
        size += float((stretch * weights.square()).sum())
    return math.sqrt(difference / size) if size else math.nan


def _drifted(full: Mapping[str, Any], accumulated: Mapping[str, Any]) -> tuple[str, ...]:
    names = []
    for name, value in full["buffers"].items():
        other = accumulated["buffers"].get(name)
        if other is None or other.shape != value.shape:
            names.append(name.partition(":")[2])
            continue
        scale = float(torch.linalg.vector_norm(value)) or 1.0
        if float(torch.linalg.vector_norm(other - value)) > _BUFFER_NOISE * scale:
            names.append(name.partition(":")[2])
    return tuple(names)
