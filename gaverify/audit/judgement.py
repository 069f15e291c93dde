"""Compares every update of both runs, parameter by parameter, against the noise floor of the perturbed run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from gaverify.audit.fitting import fit_weights
from gaverify.audit.reading import Run
from gaverify.audit.records import RowCheck, UpdateComparison
from gaverify.audit.same_data import check_rows
from gaverify.audit.windows import Window, windows_of
from gaverify.comparison import Difference, measure
from gaverify.control import judge_by_floor
from gaverify.errors import ProblemError
from gaverify.precision import unit_roundoff
from gaverify.results import Outcome, ParameterComparison

_BUFFER_NOISE = 1e-4  # buffers that differ by less differ by rounding


def compare_updates(full: Run, perturbed: Run, accumulated: Run, updates: int) -> tuple[UpdateComparison, ...]:
    """Returns a comparison for each update that both runs made, at most `updates` of them."""
    _check_parameters(full, accumulated)
    unit = working_unit(full)
    windows = {window.number: window for window in windows_of(accumulated.events)}
    compared: list[UpdateComparison] = []
    judged = True
    for number in range(1, min(full.updates, accumulated.updates, updates) + 1):
        data = check_rows(full.rows(number), accumulated.rows(number))
        judged = judged and data.same
        rows = _rows(full, perturbed, accumulated, number, unit)
        outcome = _outcome(rows)
        compared.append(
            _comparison(full.samples(number), accumulated.samples(number), windows.get(number), rows, outcome, data,
                        judged, number)
        )  # fmt: skip
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


def _rows(full: Run, perturbed: Run, accumulated: Run, number: int, unit: float) -> tuple[ParameterComparison, ...]:
    reference, actual = _aligned(full.gradients(number), accumulated.gradients(number))
    working = {row.name: row for row in measure(actual, reference)}
    floor = dict.fromkeys(working, 0.0)
    if perturbed.updates >= number:
        reference, moved = _aligned(full.gradients(number), perturbed.gradients(number))
        floor |= {row.name: row.difference for row in measure(moved, reference) if math.isfinite(row.difference)}
    return tuple(judge_by_floor(working, floor, {}, unit))




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
        learning_rates=_rates(accumulated), learning_rates_full=_rates(full),
        weights_difference=_weights_difference(full, accumulated), drifted=_drifted(full, accumulated),
    )  # fmt: skip


def _rates(samples: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(rate for rates in samples["lrs"].values() for rate in rates)


def _weights_difference(full: Mapping[str, Any], accumulated: Mapping[str, Any]) -> float:
    """Relative, over the sampled elements, each standing for its share of its parameter."""
    difference = size = 0.0
    for at, weights in full["weights"].items():
        other = accumulated["weights"].get(at)
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
