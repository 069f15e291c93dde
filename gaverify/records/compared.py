"""What both gradients came to as a whole: the rows, what decided, and what all parameters say together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gaverify.records.comparison import Method, Outcome, ParameterComparison
from gaverify.records.totals import relative_total


@dataclass(frozen=True)
class PrecisionLoss:
    """Relative error against float64 of the full-batch and of the accumulated gradient, in the working dtype.

    Where `samples` is not 0, the error was measured on so many of them, and `accumulated` has what adding up lost, too.
    """

    dtype: str
    full: float
    accumulated: float
    in_float32: float | None = None
    samples: int = 0

    @property
    def bits_lost(self) -> float:
        """How many bits less the accumulated gradient has."""
        if not (self.full > 0 and self.accumulated > 0):
            return 0.0
        return math.log2(self.accumulated / self.full)


@dataclass(frozen=True)
class FewSamples:
    """What decided a window below float32: its weights by fit, and what a few of its samples showed.

    All but `samples` are relative: to the gradient of the whole batch (`rest`, what its micro-batches leave of it;
    `lost`, what adding them up in the parameters' precision lost), to that of these samples (`structure`, what they
    leave in float64, at once against one by one; `rounding`, the same in the working precision; `error`, how far that
    is from float64), or to a weight (`weights`, how far the weights that fit best are from those that were used).
    `allowed` is the largest difference of the whole gradient that is rounding, relative to it.
    """

    samples: int
    structure: float
    rounding: float
    error: float
    rest: float = math.nan
    weights: float = math.nan
    lost: float = math.nan
    allowed: float = math.nan


@dataclass(frozen=True)
class Compared:
    """What both gradients came to, parameter by parameter, and the method that decided.

    `control_failure` says why the float64 control could not run, where it could not. `update` is the number of the
    optimizer update that was compared in a training loop.
    """

    rows: tuple[ParameterComparison, ...]
    method: Method
    control_failure: str = ""
    precision: PrecisionLoss | None = None
    update: int | None = None

    @property
    def divergent(self) -> tuple[ParameterComparison, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if row.outcome is Outcome.DIVERGENT)

    @property
    def comparable(self) -> bool:
        """Whether every divergent row has finite numbers on both sides."""
        return all(math.isfinite(row.difference_norm) for row in self.divergent)

    @property
    def largest(self) -> str:
        """The largest relative difference as text, with the parameter that shows it."""
        rows = [row for row in self.divergent if math.isfinite(row.relative_difference)]
        rows = [row for row in rows if not row.vanishing] or rows
        if not rows:
            return "no finite difference"
        row = max(rows, key=lambda row: row.relative_difference)
        return f"relative difference {row.relative_difference:.1e} in `{row.name}`"

    @property
    def total(self) -> float:
        """‖accumulated − full‖ / ‖full‖ over all parameters with finite numbers."""
        return relative_total((row.difference_norm, row.reference_norm) for row in self.rows)

    @property
    def scale(self) -> tuple[float, float]:
        """The factor c in accumulated ≈ c · full over all parameters, and what it leaves over relative to ‖full‖.

        From the norms alone: a·e = (‖a‖² + ‖e‖² − ‖a − e‖²) / 2.
        """
        rows = [row for row in self.rows if math.isfinite(row.difference_norm)]
        reference = sum(row.reference_norm**2 for row in rows)
        if reference == 0.0:
            return math.nan, math.inf
        factor = sum(row.accumulated_norm**2 + row.reference_norm**2 - row.difference_norm**2 for row in rows) / 2
        factor /= reference
        left = sum(row.accumulated_norm**2 for row in rows) - factor**2 * reference
        return factor, math.sqrt(max(left, 0.0) / reference)
