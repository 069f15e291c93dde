"""How much of its old value a moving average of weights keeps when it is updated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gaverify.audit.recording.sampling import Sample

_UNITS = 16.0  # roundings of a weight that an average may be off by


class Average:
    """One update of an averaged copy of a model: new = decay · old + (1 − decay) · weights.

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
        apart = self._old - self._weights
        size, weights = float(torch.linalg.vector_norm(apart)), float(torch.linalg.vector_norm(self._weights))
        kinds = [torch.finfo(p.dtype).eps for p in self._average.parameters if p.is_floating_point()]
        slack = _UNITS * max(kinds, default=1.0) * weights
        if not size > slack:
            return {}
        return {"decay": float((self._average.weights() - self._weights) @ apart) / size**2, "slack": slack / size}
