"""The accumulation window of one update: `run` and `audit` fill the same record, and each rule judges it once.

Shapes: K micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gaverify.records.experiment import ControlRun, Count, Operation, WeightFit, are_shares
from gaverify.thresholds import COMPUTED_FLOAT32, LOST_SHARE, NO_WEIGHT

SCRIPT = "the script's own"
"""The weighting of a training loop."""
EXPLICIT = "explicit"
"""The weighting of a recipe in numbers, or in a function of the user's."""


@dataclass(frozen=True)
class AccumulationWindow:
    """The micro-batches of one update, how they are weighted, and the weights that would be right."""

    used: tuple[float, ...] = ()
    """Weight of each micro-batch in the accumulated gradient; in an audit fitted, and empty without a fit."""
    weighting: str = SCRIPT
    """The recipe of these weights: "uniform", "samples", …"""
    sizes: tuple[int, ...] = ()
    """Samples of each micro-batch; in an audit of each forward pass, 0 where unknown."""
    steps: int = 0
    """K, the number of micro-batches; in an audit the backward passes of the accumulated run."""
    losses: tuple[float, ...] = ()
    """Loss of each micro-batch before its weight in `used`; in an audit as the script scaled it, NaN where unknown."""
    full_loss: float = math.nan
    """Value whose gradient is the full batch's; NaN where its gradient is no weighted sum of its passes."""
    # Whole numbers in an audit, whose document shows them as such; a run may count parts of targets.
    valid_targets: tuple[int | float, ...] = ()
    """Targets of each micro-batch that the loss counts; empty where one is unknown."""
    ignored_targets: bool = False
    """Whether some targets count for nothing."""
    fit: WeightFit | None = None
    """The weights that would be right; in an audit at the stage that decided the update; None without a fit."""
    remedy: ControlRun | None = None
    """The run with them, or with the window's counts; in an audit `ControlResults.weighted_run` holds it."""
    failure: str = ""
    """Why that run was impossible; the weights stay suspected then."""
    place: Operation | None = None
    """The loss call or division whose result the fitted weights add up."""
    counts: tuple[Count, ...] = ()
    """What each micro-batch divides by, where dividing by the window's count is the remedy."""
    divisors: tuple[float, ...] = ()
    """Divisor of each loss up to a common factor, where no targets were seen; empty where one is unknown."""
    scales: tuple[tuple[float, ...], ...] = ()
    """For each backward pass, the factors of each number that its loss was made from, outermost first."""

    @property
    def has_wrong_weights(self) -> bool:
        """Whether the fitted weights are what is wrong: they were tried, or only the trial was impossible."""
        return self.remedy is not None or bool(self.failure)

    @property
    def lost_micro_batches(self) -> tuple[int, ...]:
        """The micro-batches of a strategy that never reach its gradient."""
        # Only a loop can lose a micro-batch: the weights of a recipe are given.
        largest = max(map(abs, self.used), default=0.0)
        return tuple(k for k, w in enumerate(self.used) if self.weighting == SCRIPT and abs(w) < LOST_SHARE * largest)

    @property
    def given_wrong(self) -> bool:
        """Whether weights were given as numbers where the shares of the samples are right: nothing in a model is so."""
        return self.weighting == EXPLICIT and self.fit is not None and are_shares(self.fit.weights, self.sizes)

    def name_shares(
        self,
        weights: Sequence[float],
        rel_tol: float = COMPUTED_FLOAT32,
        abs_tol: float = NO_WEIGHT,
        divisors: Sequence[float] = (),
    ) -> str:
        """Returns the name of the amounts that weights are the shares of; "" where they are of none that was seen.

        Args:
            weights: One for each micro-batch.
            rel_tol: How far a weight may be from its share, relative.
            abs_tol: How far a weight of about zero may be from zero.
            divisors: What each loss is divided by, where that is known beside the samples and the targets.
        """
        # Samples come first: where every sample has as many targets, the shares of both are the same.
        amounts = (("samples", self.sizes), ("targets", self.valid_targets), ("counted", divisors))
        return next((name for name, each in amounts if are_shares(weights, each, rel_tol, abs_tol)), "")

    def refit(self, fit: WeightFit | None) -> AccumulationWindow:
        """Returns the same micro-batches with another fit; it finds the weights that a script used as well."""
        return replace(self, fit=fit, used=fit.used if fit is not None else ())
