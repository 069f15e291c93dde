"""Which weights a training loop gives its micro-batches, read from those that a fit shows to be right.

For micro-batch k of K, with n_k of N samples:

    s_k         what the script multiplies the micro-batch's loss by: 1/K, n_k/N, ...
    c_k         what that loss should be multiplied by on top of s_k, from a fit
    w_k = s_k c_k   the right weight; the weights of a mean add up to 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import combinations

from gaverify.records.audit import UpdateComparison
from gaverify.rules.scale import are_near_shares


class ScriptShares(Enum):
    """What the weights of a script are shares of."""

    EQUAL = auto()
    SAMPLES = auto()
    TARGETS = auto()
    OTHER = auto()


@dataclass(frozen=True)
class ScriptWeights:
    """The weights s_k of a script, and how many times a mean they count together: 1 where they add up to one mean."""

    shares: ScriptShares
    weights: tuple[float, ...]
    total: float = 1.0

    def right_weights(self, multipliers: Sequence[float]) -> tuple[float, ...]:
        """Returns the weights w_k that a mean over the full batch has, given the multipliers c_k."""
        products = [weight * multiplier for weight, multiplier in zip(self.weights, multipliers, strict=True)]
        total = sum(products)
        return tuple(product / total for product in products)


def identify_script_weights(
    update: UpdateComparison, multipliers: Sequence[float], tolerance: float
) -> ScriptWeights | None:
    """Returns the weights of a script with which the right ones add up to a mean; None where no known ones do.

    Multipliers that make up for a divisor of each micro-batch that is no count (a moving average, which the next
    forward finds changed) add up to a mean with no such weights: a fit alone does not tell the two apart.

    Args:
        update: The update that differs.
        multipliers: c_k, one for each backward pass.
        tolerance: How far the sum may be off, relative.
    """
    steps = len(multipliers)
    for shares, amounts in (
        (ScriptShares.EQUAL, (1,) * steps),
        (ScriptShares.SAMPLES, update.window.sizes),
        (ScriptShares.TARGETS, update.window.valid_targets),
    ):
        if len(amounts) != steps or not sum(amounts) > 0:
            continue
        weights = tuple(amount / sum(amounts) for amount in amounts)
        total = sum(weight * multiplier for weight, multiplier in zip(weights, multipliers, strict=True))
        # A script that does not divide by K, or divides by it once too often, has K or 1/K times these weights.
        if any(math.isclose(total, usual_total, rel_tol=tolerance) for usual_total in (1 / steps, 1.0, float(steps))):
            return ScriptWeights(shares, weights, 1 / total)
    return next(_from_graph(update, multipliers, tolerance), None)


def _from_graph(update: UpdateComparison, multipliers: Sequence[float], tolerance: float) -> Iterator[ScriptWeights]:
    """Yields weights that the graph of the losses shows, where the right ones add up to a mean with them."""
    steps, scales = len(multipliers), update.window.scales
    depths = {len(each) for each in scales}
    if len(scales) != steps or len(depths) != 1:
        return
    # The outermost factor may be that of a gradient scaler, which the step divides out: any stretch of factors counts.
    for outer, inner in combinations(range(depths.pop()), 2):
        weights = tuple(each[inner] / each[outer] if each[outer] else math.nan for each in scales)
        products = [weight * multiplier for weight, multiplier in zip(weights, multipliers, strict=True)]
        # Where samples are what counts, the weights may be a divisor with state, such as a moving average that is 1 for
        # the full batch.
        by_samples = are_near_shares(products, update.window.sizes, tolerance)
        if math.isclose(sum(products), 1.0, rel_tol=tolerance) and not by_samples:
            yield ScriptWeights(ScriptShares.OTHER, weights, sum(weights))
