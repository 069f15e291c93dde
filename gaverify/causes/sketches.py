"""Sketches of gradients: what is kept of passes, and which micro-batch weights would have given the full batch's.

Shapes: K micro-batches; sketches of length S = 4096 stand for the gradients, so no more than one is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gaverify.passes.gradients import Gradients, PassProbe, PassResult
from gaverify.passes.sketches import SINGULAR_FLOAT64, fit_weights, gradient_noise, sketch
from gaverify.passes.task import Task
from gaverify.records.weights import WeightFit
from gaverify.thresholds import TINY


@dataclass
class Sketches:
    """One accumulated run in sketches: g_k as `columns` (S, K), g_full as `target` (S,), the weights that were used."""

    columns: torch.Tensor
    target: torch.Tensor
    used: torch.Tensor


@dataclass(frozen=True)
class Earlier:
    """A pass of the full batch that was made before: a sketch of its gradient stands for it, so its memory is free.

    `full` is the pass without its gradients, `gradient` their sketch, `present` names those that were not None.
    `shares` are its micro-batches' own gradients and `watch` is what looked on, where they were listened to.
    """

    full: PassResult
    gradient: torch.Tensor
    present: frozenset[str]
    shares: Sketches | None = None
    watch: PassProbe | None = None

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
    earlier = Earlier(full, sketch(list(full.gradients.values())), _present(full.gradients))
    full.gradients = dict.fromkeys(full.gradients)
    return earlier


def _present(gradients: Gradients) -> frozenset[str]:
    return frozenset(name for name, gradient in gradients.items() if gradient is not None)


class Sums:
    """Keeps a sketch of what has accumulated in `.grad`, after each backward pass of one run.

    The sketch is linear, so the difference of two is the sketch of one micro-batch's share.
    """

    def __init__(self, task: Task) -> None:
        self._parameters = list(task.parameters.values())
        self._sums: list[torch.Tensor] = []

    def note(self, _: int) -> None:
        """Takes the sketch."""
        self._sums.append(sketch([parameter.grad for parameter in self._parameters]))

    def shares(self, target: torch.Tensor, used: Sequence[float]) -> Sketches:
        """Returns the micro-batches' own gradients, by the weights that were used.

        Args:
            target: The sketch of the full batch's gradient.
            used: The micro-batch weights.
        """
        sums = self._sums
        if len({part.device for part in (target, *sums)}) > 1:  # some reached the parameters of one device only
            target, sums = target.cpu().double(), [part.cpu().double() for part in sums]
        steps = torch.stack([sums[0], *(b - a for a, b in pairwise(sums))], dim=1)
        weights = torch.tensor(used, dtype=steps.dtype, device=steps.device)
        return Sketches(steps / torch.where(weights == 0, torch.ones_like(weights), weights), target, weights)


def fitted(runs: Sequence[Sketches]) -> WeightFit:
    """Returns the least-squares weights that explain all runs at once; each run counts relative to its own gradient.

        min ‖g_full − Σ c_k g_k‖

    Where c is not unique, the one nearest to the weights that were used is returned.
    """
    norms = [torch.linalg.vector_norm(run.target).clamp_min(TINY) for run in runs]
    columns = torch.cat([run.columns / norm for run, norm in zip(runs, norms, strict=True)])
    target = torch.cat([run.target / norm for run, norm in zip(runs, norms, strict=True)])
    equations = int((target != 0).logical_or(columns.any(1)).sum())  # a small gradient leaves most of a sketch empty
    fit = fit_weights(columns, target, weights=runs[0].used, singular=SINGULAR_FLOAT64, equations=equations)
    shares = runs[0].columns / norms[0] * torch.tensor(fit.weights, dtype=columns.dtype, device=columns.device)
    return replace(fit, noise=gradient_noise(shares))
