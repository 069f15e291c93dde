"""Compares two sets of gradients: a row of numbers per parameter, measured in bulk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gaverify.passes.precision import unit_roundoff
from gaverify.passes.reference import Spilled
from gaverify.records.comparison import NotCompared
from gaverify.records.totals import relative_total
from gaverify.thresholds import FEW_UNITS
from gaverify.verdict.criteria import Difference
from gaverify.verdict.norms import Alike, norms_of
from gaverify.verdict.worst import worst_elements

Gradients = Mapping[str, torch.Tensor | None]


def measure(accumulated: Gradients, reference: Gradients, *, located: bool = False) -> list[Difference]:
    """Returns the norms of both gradients and of their difference for every parameter, in the order of `reference`.

    Args:
        accumulated: The gradients under test (`actual`), by parameter name.
        reference: The full-batch gradients (`expected`), under the same names.
        located: Look for the worst element wherever there is a difference; else only where it is not surely rounding.

    A gradient of None is not a zero: a parameter that has one on one side only gets a NaN difference and a reason.
    Those on disk are read a portion at a time. Sparse gradients are coalesced; complex ones are measured by modulus.
    """
    on_disk = next((side for side in (reference, accumulated) if isinstance(side, Spilled)), None)
    if on_disk is not None:
        return [row for names in on_disk.portions() for row in _portion(accumulated, reference, names, located)]
    return _measured(accumulated, reference, located)


def left_between(gradients: Gradients, reference: Gradients) -> float:
    """Returns ‖gradients − reference‖ / ‖reference‖ of the whole gradient; 0 where there is none."""
    return relative_total((row.difference, row.reference) for row in measure(gradients, reference))


def _portion(accumulated: Gradients, reference: Gradients, names: Sequence[str], located: bool) -> list[Difference]:
    """Measures some of the parameters, whose gradients are in memory for that long."""
    return _measured({name: accumulated[name] for name in names}, {name: reference[name] for name in names}, located)


def _measured(accumulated: Gradients, reference: Gradients, located: bool) -> list[Difference]:
    rows: dict[str, Difference] = {}
    alike: dict[tuple[Any, ...], Alike] = {}
    for name, expected in reference.items():
        actual = accumulated[name]
        if expected is None or actual is None:
            rows[name] = _one_sided(name, actual, expected)
            continue
        if expected.layout is not torch.strided or actual.layout is not torch.strided:
            expected, actual = expected.to_dense(), actual.to_dense()
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
        shape, units = group.shape, 0.0 if located else FEW_UNITS * unit_roundoff(group.expected[0].dtype)
        for at, name in enumerate(group.names):
            e, a, d = next(numbers)
            if not d < math.inf:
                rows[name] = _not_finite(name, shape, e, a)
                continue
            # as `Difference(…)`, without its function in Python
            rows[name] = tuple.__new__(Difference, (name, shape, e, a, d, None, None))
            if d > units * (e if e > a else a):
                unsure[name] = group.expected[at], group.actual[at]
    places = worst_elements(list(unsure.values()), [rows[name].shape for name in unsure])
    for name, element in zip(unsure, places, strict=True):
        rows[name] = rows[name]._replace(worst=element)
    return [rows[name] for name in reference]


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
