"""Decides an update below float32 by the weights that fit: moved weights tell nothing about its rounding.

    d     ‖accumulated − full‖ / ‖full‖, all parameters together
    rest  what the best weights of the micro-batches leave of the full batch's gradient

Rounding is not coherent with the micro-batches' gradients: it stays in the rest, whatever the weights are. A wrong
weight is nothing else. Moving every weight by its roundoff, the measure in float32, moves a bfloat16 gradient by 10 to
90 %, where two right runs differ by 0.3 to 2 %.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gaverify.audit.stages import Rows
from gaverify.records.comparison import Method, Outcome, ParameterComparison
from gaverify.records.totals import relative_total
from gaverify.records.weights import WeightFit
from gaverify.thresholds import LAST_DIGITS, LITTLE, MOSTLY, REST_UNITS, U32


def decided_by_weights(rows: Rows, fit: WeightFit | None, unit: float) -> Rows:
    """Returns the rows as the fit decides them; as they are where it tells nothing, and in float32.

    Args:
        rows: What was measured, decided by the noise floor.
        fit: Of the gradients at the same stage.
        unit: Unit roundoff of the coarsest arithmetic.
    """
    if unit <= U32 or fit is None or fit.vacuous or any(row.why is not None for row in rows.parameters):
        return rows
    whole = math.hypot(*(row.reference_norm for row in rows.parameters))
    apart = relative_total((row.difference_norm, row.reference_norm) for row in rows.parameters)
    allowed = REST_UNITS * unit
    if not whole > 0.0 or not math.isfinite(apart) or not fit.residual <= allowed:
        return rows
    explained = 1.0 - (fit.residual / apart) ** 2 if apart > 0.0 else 0.0
    if apart <= allowed and (apart <= LAST_DIGITS * unit or explained <= LITTLE):
        decided = [_by_weights(row, Outcome.EQUIVALENT, allowed * whole) for row in rows.parameters]
    elif apart > allowed and explained > MOSTLY:
        # the weights are wrong for every parameter; a row shows it where it differs by more than rounding leaves
        limits = [fit.residual * max(row.reference_norm, row.accumulated_norm) for row in rows.parameters]
        decided = [
            _by_weights(row, Outcome.DIVERGENT if row.difference_norm > limit else Outcome.INCONCLUSIVE, limit)
            for row, limit in zip(rows.parameters, limits, strict=True)
        ]
    else:
        return rows
    return replace(rows, parameters=tuple(decided), noise=fit.residual)


def _by_weights(row: ParameterComparison, outcome: Outcome, allowed: float) -> ParameterComparison:
    return row._replace(outcome=outcome, method=Method.WEIGHTS, allowed=allowed)
