"""The criterion of `torch.testing.assert_close`, where the caller gives the tolerances."""

from __future__ import annotations

import math

import torch

from gaverify.passes.gradients import Gradients
from gaverify.records.comparison import Method, Outcome, ParameterComparison
from gaverify.verdict.criteria import Difference, not_compared, record


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
            limit = atol + rtol * expected.abs().double()
            allowed = float(torch.linalg.vector_norm(limit))
        missing = row.why is not None
        rows.append(not_compared(row) if missing else record(row, outcome, Method.TOLERANCE, allowed, row.difference))
    return rows
