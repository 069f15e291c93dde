"""Compares two sets of gradients: a row of numbers per parameter, measured in bulk."""

from __future__ import annotations

import math
from typing import Any

import torch

from gaverify.passes.gradients import Gradients
from gaverify.passes.precision import unit_roundoff
from gaverify.passes.wrappers import RankSum, is_sharded, local, share_of
from gaverify.records.comparison import Method, NotCompared, Outcome, ParameterComparison, relative_total
from gaverify.thresholds import FEW_UNITS
from gaverify.verdict.criteria import Difference, not_compared, record
from gaverify.verdict.norms import Alike, norms_of, worst_elements


def measure(
    accumulated: Gradients, reference: Gradients, ranks: RankSum | None = None, *, find_worst: bool = False
) -> list[Difference]:
    """Returns the norms of both gradients and of their difference for every parameter, in the order of `reference`.

    Args:
        accumulated: The gradients under test (`actual`), by parameter name.
        reference: The full-batch gradients (`expected`), under the same names.
        ranks: Measures what all of them hold together, in one collective for all parameters; each rank has to call
            this. None: what this process holds.
        find_worst: Look for the worst element wherever there is a difference; else where it may be no rounding.

    A gradient of None is not a zero: a parameter that has one on one side only gets a NaN difference and a reason.
    Sparse gradients are coalesced; complex ones are measured by modulus.
    """
    if ranks is not None:
        return _measure_all_ranks(accumulated, reference, ranks)
    return _measure_pairs(accumulated, reference, find_worst)


def left_between(gradients: Gradients, reference: Gradients, ranks: RankSum | None = None) -> float:
    """Returns ‖gradients − reference‖ / ‖reference‖ of the whole gradient; 0 where there is none."""
    return relative_total((row.difference, row.reference) for row in measure(gradients, reference, ranks))


def _measure_pairs(accumulated: Gradients, reference: Gradients, find_worst: bool) -> list[Difference]:
    rows: dict[str, Difference] = {}
    alike: dict[tuple[Any, ...], Alike] = {}
    for name, expected in reference.items():
        actual = accumulated[name]
        if expected is None or actual is None:
            rows[name] = _one_sided(name, actual, expected)
            continue
        if expected.layout is not torch.strided or actual.layout is not torch.strided:
            expected, actual = expected.to_dense(), actual.to_dense()
        # One reduction per shape in place of one per parameter: a launch per parameter costs more than the numbers.
        key = expected.shape, expected.dtype, actual.dtype, expected.get_device()
        group = alike.get(key)
        if group is None:
            group = alike[key] = Alike(tuple(expected.shape), [], [], [])
        group.names.append(name)
        group.expected.append(expected)
        group.actual.append(actual)
    groups = [group.real() for group in alike.values()]
    numbers = iter(norms_of(groups))
    unsure: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for group in groups:
        shape, units = group.shape, 0.0 if find_worst else FEW_UNITS * unit_roundoff(group.expected[0].dtype)
        for at, name in enumerate(group.names):
            e, a, d = next(numbers)
            # Written so that NaN, which compares false with everything, is caught as well.
            if not d < math.inf:
                rows[name] = _not_finite(name, shape, e, a)
                continue
            # as `Difference(…)`, without its function in Python
            rows[name] = tuple.__new__(Difference, (name, shape, e, a, d, None, None))
            # The worst element takes another pass over the gradients: only where the difference may be no rounding.
            if d > units * (e if e > a else a):
                unsure[name] = group.expected[at], group.actual[at]
    places = worst_elements(list(unsure.values()), [rows[name].shape for name in unsure])
    for name, element in zip(unsure, places, strict=True):
        rows[name] = rows[name]._replace(worst=element)
    return [rows[name] for name in reference]


def _measure_all_ranks(accumulated: Gradients, reference: Gradients, ranks: RankSum) -> list[Difference]:
    """Measures what this rank holds and adds up all ranks' squares: every rank gets the same numbers."""
    shards = [{name: None if g is None else local(g) for name, g in side.items()} for side in (accumulated, reference)]
    rows = _measure_pairs(shards[0], shards[1], False)
    table = []
    for row in rows:
        sides = (reference[row.name], accumulated[row.name])
        first_present = next((side for side in sides if side is not None), None)
        # A replica that all ranks hold counts once in all, a shard counts in full on its rank.
        share = share_of(first_present, ranks.count) if first_present is not None else 0.0
        norms = (row.reference, row.accumulated, row.difference)
        # NaN would make the sums of all ranks NaN, and their rows could not be told apart any more.
        squares = [share * norm * norm if row.why is None or norm == norm else 0.0 for norm in norms]
        odd = row.why not in (None, NotCompared.UNUSED) and None not in sides
        table.append([*squares, *(float(side is not None) for side in sides), float(odd)])
    sums = ranks.add_up(torch.tensor(table, dtype=torch.float64, device="cpu").view(-1, 6)).tolist()
    differences = []
    for row, (e, a, d, with_e, with_a, odd) in zip(rows, sums, strict=True):
        sides = (reference[row.name], accumulated[row.name])
        first_present = next((side for side in sides if side is not None), None)
        shape = tuple(first_present.shape) if first_present is not None else row.shape
        # A gradient that some ranks lack is missing, whatever the others have: their optimizers step differently.
        if min(with_e, with_a) < ranks.count:
            differences.append(_missing(row.name, shape, with_e, with_a))
        elif odd or not math.isfinite(d):
            differences.append(_not_finite(row.name, shape, math.sqrt(e), math.sqrt(a)))
        else:
            # The worst element of a shard is not that of the parameter, which no rank sees as a whole.
            worst = None if is_sharded(first_present) else row.worst
            differences.append(Difference(row.name, shape, math.sqrt(e), math.sqrt(a), math.sqrt(d), worst, None))
    return differences


def _missing(name: str, shape: tuple[int, ...], reference: float, accumulated: float) -> Difference:
    """The row of a parameter without a gradient on some ranks, or on all; given how many have one on each side."""
    why = NotCompared.MISSING_IN_ACCUMULATED if accumulated < reference else NotCompared.MISSING_IN_FULL
    why = why if reference or accumulated else NotCompared.UNUSED
    return Difference(name, shape, math.nan, math.nan, math.nan, None, why)


def _one_sided(name: str, actual: torch.Tensor | None, expected: torch.Tensor | None) -> Difference:
    present = expected if expected is not None else actual
    if present is None:
        return Difference(name, (), math.nan, math.nan, math.nan, None, NotCompared.UNUSED)
    why = NotCompared.MISSING_IN_ACCUMULATED if actual is None else NotCompared.MISSING_IN_FULL
    return Difference(name, tuple(present.shape), math.nan, math.nan, math.nan, None, why)


def _not_finite(name: str, shape: tuple[int, ...], reference: float, accumulated: float) -> Difference:
    if not math.isfinite(reference) and not math.isfinite(accumulated):
        why = NotCompared.NOT_FINITE_IN_BOTH
    else:
        only = math.isfinite(reference)
        why = NotCompared.NOT_FINITE_IN_ACCUMULATED if only else NotCompared.NOT_FINITE_IN_FULL
    return Difference(name, shape, reference, accumulated, math.nan, None, why)


def by_tolerance(
    measured: list[Difference], accumulated: Gradients, reference: Gradients, rtol: float, atol: float
) -> list[ParameterComparison]:
    """Decides by |actual − expected| ≤ atol + rtol · |expected| for every element, as `assert_close` does."""
    rows = []
    for row in measured:
        actual, expected = accumulated[row.name], reference[row.name]
        allowed, outcome = math.nan, Outcome.INCONCLUSIVE
        if actual is not None and expected is not None:
            actual, expected = (t.to_dense() if t.layout is not torch.strided else t for t in (actual, expected))
            close = bool(torch.isclose(actual, expected, rtol=rtol, atol=atol).all())
            outcome = Outcome.EQUIVALENT if close else Outcome.DIVERGENT
            # The norm of all elements' limits: what a report prints beside the norm of the difference.
            limit = atol + rtol * expected.abs().double()
            allowed = float(torch.linalg.vector_norm(limit))
        missing = row.why is not None
        rows.append(not_compared(row) if missing else record(row, outcome, Method.TOLERANCE, allowed, row.difference))
    return rows
