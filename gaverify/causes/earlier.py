"""A pass of the full batch that was made before: a sketch of its gradient stands for it, so that its memory is free."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gaverify.causes.sketches import Sketches
from gaverify.passes.gradients import Gradients, PassProbe, PassResult
from gaverify.passes.sketches import sketch


@dataclass(frozen=True)
class Earlier:
    """What is kept of the pass.

    `full` is the pass without its gradients, `gradient` their sketch, `present` names those that were not None;
    `elements` is how many numbers they had. `shares` are its micro-batches' own gradients and
    `watch` is what looked on, where they were listened to.
    """

    full: PassResult
    gradient: torch.Tensor
    present: frozenset[str]
    elements: int = 0
    shares: Sketches | None = None
    watch: PassProbe | None = None

    @property
    def loss(self) -> float:
        """The loss of the full batch."""
        return self.full.loss

    @property
    def norm(self) -> float:
        """The norm of the gradient, as its sketch tells it."""
        return float(torch.linalg.vector_norm(self.gradient))

    @property
    def comparable(self) -> bool:
        """Whether another gradient can be held against this one: it is not zero, and finite."""
        return 0.0 < self.norm < math.inf

    def difference(self, gradients: Gradients) -> float:
        """Returns ‖gradients − g‖ / ‖g‖ by sketches; infinite where a parameter has a gradient on one side only.

        A sketch keeps linear relations exactly: it cannot make a difference out of rounding. It hides one only where
        all of it falls into the same buckets with opposite signs.
        """
        if _present(gradients) != self.present:
            return math.inf
        found = sketch(list(gradients.values())).to(self.gradient.device)
        left = float(torch.linalg.vector_norm(found - self.gradient)) / self.norm
        return left if math.isfinite(left) else math.inf


def kept(full: PassResult) -> Earlier:
    """Keeps a sketch of the full batch's gradient, and leaves its memory to the next pass."""
    gradients = list(full.gradients.values())
    elements = sum(gradient.numel() for gradient in gradients if gradient is not None)
    earlier = Earlier(full, sketch(gradients), _present(full.gradients), elements)
    full.gradients = dict.fromkeys(full.gradients)
    return earlier


def _present(gradients: Gradients) -> frozenset[str]:
    return frozenset(name for name, gradient in gradients.items() if gradient is not None)
