"""Puts the gradients of earlier micro-batches back where a forward clears or changes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from gaverify.passes.gradients import PassProbe


class GradientsKept(PassProbe):
    """Lets every backward add to the gradients that stood there before its forward.

    Args:
        parameters: Whose gradients.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = list(parameters.values())
        self._before: list[torch.Tensor | None] = []

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Copies the gradients before the forward."""
        self._before = [p.grad.clone() if p.grad is not None else None for p in self._parameters]
        yield

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts them back, then runs the backward."""
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient
        super().backward(k, loss, weight)
