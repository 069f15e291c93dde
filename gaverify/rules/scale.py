"""What a difference is worth in weights: one factor for everything, or other weights for the micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.facts import Weights
from gaverify.records.weights import LossTerm, WeightFit, alike, are_shares


def factor_in_loop(loop: Record, update: UpdateComparison) -> float | None:
    """Returns c where the accumulated gradient of an update is c ≠ 1 times the full batch's, to rounding."""
    if not update.judged or not _differs(update) or update.fit is None:
        return None
    return constant_factor(update.fit, loop.tolerance)


def counted_at(weights: Weights) -> str:
    """Names the loss call or division that counts otherwise than the micro-batches are weighted; empty if unknown."""
    place = weights.place
    if place is None:
        return ""
    line = f": `{place.source}`" if place.source else ""
    return f"; counted by {place}{line}" + (f" ({place.caller})" if place.caller else "")


def factor_of_some(loop: Record, update: UpdateComparison) -> tuple[float, tuple[ParameterComparison, ...]] | None:
    """Returns K or 1/K, and the parameters whose gradients are so many times the full batch's while all others agree.

    ‖a‖ = c ‖f‖ and ‖a − f‖ = |c − 1| ‖f‖ together mean a = c f.
    """
    rows = tuple(row for row in update.parameters if row.outcome is Outcome.DIVERGENT)
    agree = [row for row in update.parameters if row.outcome is Outcome.EQUIVALENT]
    if not update.judged or update.backwards < 2 or not rows or len(rows) + len(agree) < len(update.parameters):
        return None
    for factor in (float(update.backwards), 1 / update.backwards):
        if agree and all(_is_times(row, factor, loop.tolerance) for row in rows):
            return factor, rows
    return None


def _is_times(row: ParameterComparison, factor: float, tolerance: float) -> bool:
    pairs = ((row.accumulated_norm, factor), (row.difference_norm, abs(factor - 1)))
    return all(math.isclose(size, share * row.reference_norm, rel_tol=tolerance) for size, share in pairs)


def _differs(update: UpdateComparison) -> bool:
    """Whether a gradient that both runs have differs; one that is missing has no weight to speak of."""
    return any(row.outcome is Outcome.DIVERGENT and math.isfinite(row.difference_norm) for row in update.parameters)


def constant_factor(fit: WeightFit, tolerance: float) -> float | None:
    """Returns c ≠ 1 where used = c · full, or where every micro-batch is short of its right weight by the same c."""
    factor = fit.factor
    if fit.factor_residual > tolerance:
        if fit.residual > tolerance or not constant(fit.multipliers, tolerance):
            return None
        factor = 1 / fit.multipliers[0]
    if not math.isfinite(factor) or abs(factor - 1) < tolerance:
        return None
    return factor


def weights_of(loop: Record) -> tuple[UpdateComparison, WeightFit] | None:
    """Returns the first differing update whose micro-batches give the full-batch gradient with other weights."""
    update = loop.divergent
    fit = update.fit if update is not None else None
    if update is None or fit is None or fit.residual > loop.tolerance or not fit.weights or not _differs(update):
        return None
    return (update, fit) if _unequal(fit, loop.tolerance) else None


def weighted_term(loop: Record) -> LossTerm | None:
    """Returns the first term of the loss that alone gives the full batch's gradient with other weights."""
    for term in loop.terms:
        fit = term.fit
        fits = fit.residual <= loop.tolerance < fit.factor_residual and bool(fit.weights) and not fit.vacuous
        if term.samples and fits and _unequal(fit, loop.tolerance):
            return term
    return None


def _unequal(fit: WeightFit, tolerance: float) -> bool:
    return all(map(math.isfinite, fit.multipliers)) and not constant(fit.multipliers, tolerance)


def constant(values: tuple[float, ...], tolerance: float) -> bool:
    """Whether all values are the same number and not zero."""
    finite = bool(values) and all(map(math.isfinite, values)) and values[0] != 0
    return finite and alike(values, weight_tolerance(tolerance))


def shares(fitted: tuple[float, ...], amounts: Sequence[float], tolerance: float) -> bool:
    """Whether weights are the shares of some amounts, as far as a fit can tell."""
    close = weight_tolerance(tolerance)
    return are_shares(fitted, amounts, close, close / max(len(fitted), 1))


def weight_tolerance(tolerance: float) -> float:
    """How far two fitted weights may be apart: a fit magnifies the noise of what it is fitted to."""
    return min(10 * tolerance, max(1e-3, 2 * tolerance))
