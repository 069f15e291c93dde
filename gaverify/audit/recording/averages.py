"""How much of its old value a moving average of weights keeps when it is updated."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from gaverify.audit.recording.sampling import Sample
from gaverify.thresholds import FEW_UNITS


class Fit(NamedTuple):
    """An update of an average, read as new = decay · old + (1 − decay) · weights.

    `slack` is how far rounding may have moved the decay; `exact` says that rounding alone is left over.
    """

    decay: float
    slack: float
    exact: bool


def rounding(weights: torch.Tensor, unit: float) -> float:
    """Returns how far an average may be off by rounding.

    Args:
        weights: Some elements of the weights, shape (S,).
        unit: The distance from 1 to the next number in the average's format.
    """
    return FEW_UNITS * unit * float(torch.linalg.vector_norm(weights))


def fitted(old: torch.Tensor, now: torch.Tensor, weights: torch.Tensor, allowed: float) -> Fit | None:
    """Returns the decay that explains an update best; None where old average and weights are alike, as any would do.

    Args:
        old: Some elements of the average before the update, shape (S,).
        now: The same after it.
        weights: The same elements of the weights that it follows.
        allowed: What `rounding` gives for them.
    """
    apart = old - weights
    size = float(torch.linalg.vector_norm(apart))
    if not size > allowed:
        return None
    decay = float((now - weights) @ apart) / size**2
    left = float(torch.linalg.vector_norm(now - weights - decay * apart))
    return Fit(decay, allowed / size, left <= allowed)


class Average:
    """One update of an averaged copy of a model whose call is known.

    Args:
        average: The averaged copy, before the update.
        model: The model that it follows.
    """

    def __init__(self, average: nn.Module, model: nn.Module) -> None:
        self._average = Sample(list(average.parameters()))
        self._old, self._weights = self._average.weights(), Sample(list(model.parameters())).weights()

    def decay(self) -> dict[str, Any]:
        """Returns the decay by which the average has been updated, and how far rounding may have moved it.

        Nothing is returned where the average was the weights themselves, which any decay leaves as they are.
        """
        if len(self._old) != len(self._weights):
            return {}
        kinds = [torch.finfo(p.dtype).eps for p in self._average.parameters if p.is_floating_point()]
        allowed = rounding(self._weights, max(kinds, default=1.0))
        found = fitted(self._old, self._average.weights(), self._weights, allowed)
        return {} if found is None else {"decay": found.decay, "slack": found.slack}
