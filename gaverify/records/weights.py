"""Micro-batch weights that explain a gradient, and what such weights may mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from gaverify.records.operations import Operation
from gaverify.thresholds import COMPUTED_FLOAT32, FIT_MAGNIFIES, NO_WEIGHT, SAME_NUMBER


@dataclass(frozen=True)
class WeightFit:
    """Least squares over the gradients of the K micro-batches; residuals are relative.

        g_full ≈ Σ weights_k g_k        g_used ≈ Σ used_k g_k        g_used ≈ factor · g_full

    `weights` are those that would be right, `used` those that reached the optimizer. `determined`: the gradients of the
    micro-batches tell all weights apart. `vacuous`: the model has so few parameters that some weights always fit.
    `noise` is the standard error of the full-batch gradient, estimated from its micro-batches, relative to its norm.
    """

    weights: tuple[float, ...]
    residual: float
    determined: bool = True
    noise: float = math.nan
    vacuous: bool = False
    used: tuple[float, ...] = ()
    used_residual: float = 0.0
    factor: float = math.nan
    factor_residual: float = math.inf

    @property
    def multipliers(self) -> tuple[float, ...]:
        """weights_k / used_k: what each micro-batch's loss should be multiplied by, 1 where its weight is right.

        A micro-batch that never reached the step (used 0) is held against the usual weight of the others.
        """
        present = sorted(abs(weight) for weight in self.used if abs(weight) > NO_WEIGHT * max(map(abs, self.used)))
        usual = present[len(present) // 2] if present else 1.0
        return tuple(
            right / (used if abs(used) > NO_WEIGHT * usual else usual)
            for right, used in zip(self.weights, self.used, strict=True)
        )


class TermKind(Enum):
    """What a term of a loss is that nothing divides."""

    SUM = "over the samples"
    PENALTY = "the same in every micro-batch"


@dataclass(frozen=True)
class Count:
    """What one operation divides by, or multiplies by (`times`), in each micro-batch and in the whole window.

    `counts`: the window's is the sum of theirs, so that it takes the place of the micro-batch's weight as well; else
    their mean. `added_up`: the micro-batches' losses are added up instead, where they were weighted. `term`: nothing
    is divided, the operation makes a term of the loss that counts otherwise than the micro-batches are weighted.
    """

    operation: Operation
    own: tuple[float, ...]
    window: float
    counts: bool = True
    added_up: bool = False
    times: bool = False
    term: TermKind | None = None


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss that is a sum, differentiated alone in both runs at the same weights.

    `fit` is that of its own gradient, and `samples` says whether that differs between micro-batches: that of a penalty
    on the parameters is the same. The file and line are those that made it, where they are known.
    """

    number: int
    count: int
    fit: WeightFit
    samples: bool = True
    file: str | None = None
    line: int | None = None


def are_shares(
    fitted: Sequence[float], amounts: Sequence[float], rel_tol: float = COMPUTED_FLOAT32, abs_tol: float = NO_WEIGHT
) -> bool:
    """Whether weights are the shares of some amounts."""
    total = sum(amounts)
    return (
        len(amounts) == len(fitted)
        and total > 0
        and all(
            math.isclose(weight, amount / total, rel_tol=rel_tol, abs_tol=abs_tol)
            for weight, amount in zip(fitted, amounts, strict=True)
        )
    )


def is_constant(values: Sequence[float], residual: float = 0.0) -> bool:
    """Whether all values are the same number, as far as a fit with this residual can tell."""
    return alike(values, max(SAME_NUMBER, FIT_MAGNIFIES * residual))


def alike(values: Sequence[float], rel_tol: float) -> bool:
    """Whether all values are the same number, up to a relative tolerance."""
    return bool(values) and all(math.isclose(value, values[0], rel_tol=rel_tol) for value in values)
