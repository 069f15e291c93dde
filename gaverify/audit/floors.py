"""Decides by the noise floor, in fine arithmetic and in coarse.

In float32 a fault stands 4e5 floors and more above rounding, and wide thresholds cost nothing. In bfloat16 one floor is
a percent of the gradient already, and no fault reaches 320 of them. Measured in bfloat16 and float16, weights or
autocast: Δ / floor at most 1.1 in any parameter of equivalent runs, 40 to 77 in a run that averages token means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gaverify.comparison import WORKING_UNITS, Difference, judged
from gaverify.control import judge_by_floor
from gaverify.results import Outcome, ParameterComparison

_COARSE = 2.0**-13  # above float32's and TF32's unit roundoff, below float16's and bfloat16's
_FINE_ALLOWED = 32.0  # as `judge_by_floor`
_COARSE_ALLOWED, _COARSE_FAULT = 4.0, 16.0  # around the geometric middle, 7, of what was measured


def floors_allowed(unit: float) -> float:
    """Returns how many noise floors a difference may be in arithmetic with this unit roundoff."""
    return _COARSE_ALLOWED if unit > _COARSE else _FINE_ALLOWED


def judge(working: Mapping[str, Difference], floor: Mapping[str, float], unit: float) -> list[ParameterComparison]:
    """Returns every parameter's comparison; between the thresholds it stays inconclusive."""
    if unit <= _COARSE:
        return judge_by_floor(working, floor, {}, unit)
    rows = []
    for name, row in working.items():
        smallest = WORKING_UNITS * unit * row.scale
        allowed = max(smallest, _COARSE_ALLOWED * floor[name])
        outcome = Outcome.DIVERGENT
        if row.difference <= allowed:
            outcome = Outcome.EQUIVALENT
        elif row.difference <= max(smallest, _COARSE_FAULT * floor[name]):
            outcome = Outcome.INCONCLUSIVE
        rows.append(judged(row, outcome, "noise-floor", allowed))
    return rows


def noise_of(working: Mapping[str, Difference], floor: Mapping[str, float]) -> float:
    """Returns the noise floor of the whole gradient, relative to its norm."""
    size = math.sqrt(sum(row.reference**2 for row in working.values() if math.isfinite(row.reference)))
    noise = math.sqrt(sum(value**2 for value in floor.values()))
    return noise / size if size else 0.0
