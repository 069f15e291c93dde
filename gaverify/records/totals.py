"""What the rows of a comparison say together: one outcome, one relative difference, one resolution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gaverify.records.comparison import TOGETHER, Method, Outcome, ParameterComparison
from gaverify.thresholds import TENTH


def together(outcomes: Iterable[Outcome]) -> Outcome:
    """Returns divergent if any is, equivalent if all are and there is one, inconclusive otherwise."""
    found = set(outcomes)
    if Outcome.DIVERGENT in found:
        return Outcome.DIVERGENT
    return Outcome.EQUIVALENT if found == {Outcome.EQUIVALENT} else Outcome.INCONCLUSIVE


def outcome_of(rows: Sequence[ParameterComparison]) -> Outcome:
    """Returns the outcome of all parameters; inconclusive where no fault could have been seen.

    So it is where every gradient is zero, and where a tenth of the whole gradient could hide in what is rounding.
    """
    outcome = together(row.outcome for row in rows)
    informative = any(row.reference_norm > 0 or row.accumulated_norm > 0 for row in rows)
    blind = not informative or hidden_share(rows) > TENTH
    return Outcome.INCONCLUSIVE if outcome is Outcome.EQUIVALENT and blind else outcome


def hidden_share(rows: Iterable[ParameterComparison]) -> float:
    """Returns the smallest difference that could have been seen, as a share of the whole gradient; 0 for none.

    Tolerances that were asked for hide what they hide.
    """
    rows = [row for row in rows if row.why is None and row.method != Method.TOLERANCE]
    if rows and all(row.method in TOGETHER for row in rows):
        return resolution_of(rows)
    return relative_total((row.allowed, row.reference_norm) for row in rows)


def relative_total(norms: Iterable[tuple[float, float]]) -> float:
    """Returns √(Σ difference²) / √(Σ reference²) over pairs (difference, reference) of norms; NaN pairs are left out.

    0 where nothing differs, infinite where something differs from zero.
    """
    finite = [pair for pair in norms if math.isfinite(pair[0]) and math.isfinite(pair[1])]
    difference = math.hypot(*(pair[0] for pair in finite))
    reference = math.hypot(*(pair[1] for pair in finite))
    if difference == 0.0:
        return 0.0
    return difference / reference if reference > 0.0 else math.inf


def resolution_of(rows: Iterable[ParameterComparison]) -> float:
    """Returns the smallest relative difference that could have been seen in the least clear parameter; NaN in none.

    A gradient that vanishes in the arithmetic that decided is left out: nothing can be said relative to it. Where all
    parameters were decided together, it is that of the whole gradient.
    """
    rows = [row for row in rows if row.why is None]
    if rows and all(row.method in TOGETHER for row in rows):
        return max(row.allowed for row in rows) / math.hypot(*(row.reference_norm for row in rows))
    known = [row.relative_allowed for row in rows if not row.vanishing and math.isfinite(row.relative_allowed)]
    return max((value for value in known if value > 0), default=math.nan)
