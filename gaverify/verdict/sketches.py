"""Sketches of gradients: what is kept of passes, and which micro-batch weights would have given the full batch's.

Shapes: K micro-batches; sketches of length S = 4096 stand for the gradients, so no more than one is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, PassProbe, PassResult, take_gradients
from gaverify.passes.sketches import SINGULAR_FLOAT64, SketchSum, fit_weights, gradient_noise, sketch
from gaverify.passes.wrappers import RankSum
from gaverify.records.experiment import WeightFit
from gaverify.thresholds import TINY
from gaverify.torch_internals import no_dispatch_modes
from gaverify.tracebacks import hands_over


@dataclass(frozen=True)
class Sketches:
    """A window in sketches: `full` (S,) of the full batch, `columns` (S, K) of each micro-batch before its weight.

    `used` (K,) are the weights, and `accumulated` (S,) what was in `.grad` in the end.
    """

    full: torch.Tensor
    columns: torch.Tensor
    used: torch.Tensor
    accumulated: torch.Tensor

    def relative(self, part: torch.Tensor) -> float:
        """The norm of a sketch over that of the full batch's gradient."""
        return float(torch.linalg.vector_norm(part) / torch.linalg.vector_norm(self.full))

    def left_by(self, weights: torch.Tensor) -> float:
        """The difference from the full batch's gradient that weights leave, relative to that gradient."""
        return self.relative(self.full - self.columns @ weights)


@dataclass(frozen=True)
class SketchedPass:
    """A pass of the full batch that later runs are held against: a sketch stands for its gradient, which is freed."""

    full: PassResult
    """The pass, without its gradients."""
    gradient: torch.Tensor
    """The sketch of its gradient, shape (S,)."""
    present: frozenset[str]
    """The parameters that had a gradient."""
    shares: Sketches | None = None
    """The micro-batches' own gradients in sketches; None: nobody listened to them."""
    watch: PassProbe | None = None
    """The listener of the micro-batches; None: there was none."""
    losses: Sequence[float] = ()
    """The micro-batches' losses, where they were listened to."""
    ranks: RankSum | None = None
    """Makes a sketch that of all ranks; None: it is this process's own."""

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
        # A gradient that is missing is no zero: the optimizer would skip the parameter.
        if _present(gradients) != self.present:
            return math.inf
        new_sketch = sketch(gradients.values(), self.ranks).to(self.gradient.device)
        difference_left = float(torch.linalg.vector_norm(new_sketch - self.gradient)) / self.norm
        return difference_left if math.isfinite(difference_left) else math.inf


def sketch_full_batch(experiment: Experiment, full: PassResult, shares: Sketches | None = None) -> SketchedPass:
    """Takes a sketch of the full batch's gradient, where the window has none; its memory may go after that."""
    gradient = sketch(full.gradients.values(), experiment.ranks) if shares is None else shares.full
    return SketchedPass(full, gradient, _present(full.gradients), shares, ranks=experiment.ranks)


def keep_sketch(experiment: Experiment, full: PassResult) -> SketchedPass:
    """Keeps a sketch of the full batch's gradient, and leaves its memory to the next pass."""
    reference = sketch_full_batch(experiment, full)
    full.gradients = dict.fromkeys(full.gradients)
    return reference


def _present(gradients: Gradients) -> frozenset[str]:
    return frozenset(name for name, gradient in gradients.items() if gradient is not None)


_KEPT_ON_DEVICE = 64
"""Sketches that wait on the device until they are fetched: 2 MB."""


class GradientSketches:
    """Sketches what each backward pass gives every parameter, before it is added to `.grad`.

    Args:
        experiment: The parameters of this experiment are listened to.
        release: Free each gradient once it is sketched, so that there is never a set of them.
    """

    def __init__(self, experiment: Experiment, *, release: bool = False) -> None:
        self._parameters = list(experiment.parameters.values())
        self._release = release
        self._now = SketchSum()
        self._on_device: list[torch.Tensor] = []
        self._on_host: list[torch.Tensor] = []

    @contextmanager
    def listening(self, handed_over: Collection[int] = ()) -> Iterator[Callable[[int], None]]:
        """Listens, and gives what is to be called after each backward pass.

        Args:
            handed_over: The places of parameters whose gradients `add_gradient` is given by others.
        """
        parameters = [(place, p) for place, p in enumerate(self._parameters) if place not in handed_over]
        handles = [p.register_hook(partial(self.add_gradient, place)) for place, p in parameters]
        if self._release:
            handles += [p.register_post_accumulate_grad_hook(_free_gradient) for _, p in parameters]
        try:
            yield self._take
        finally:
            for handle in handles:
                handle.remove()

    @hands_over
    def add_gradient(self, place: int, gradient: torch.Tensor) -> None:
        """Sketches a gradient of the parameter at a place; several of one parameter add up."""
        with no_dispatch_modes():
            self._now.add(gradient, place)

    def _take(self, _: int) -> None:
        with no_dispatch_modes():
            self._on_device.append(self._now.take())
        # each copy waits for the device, and K sketches there would take the memory that they are to save
        if len(self._on_device) == _KEPT_ON_DEVICE:
            self._fetch()

    def _fetch(self) -> None:
        sketches, self._on_device = self._on_device, []
        # a model on several devices has its sketches on the host already, like a backward pass that gave nothing
        together = (
            [torch.stack(sketches)] if len({each.device for each in sketches}) == 1 else [s[None] for s in sketches]
        )
        self._on_host += [column for part in together for column in part.to("cpu", torch.float64)]

    def columns(self) -> torch.Tensor:
        """The sketch of each backward pass, shape (S, passes), in float64 on the host; zeros where it gave nothing."""
        if self._on_device:
            self._fetch()
        return torch.stack(self._on_host, 1)


def _free_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def window_of(
    experiment: Experiment, full: PassResult, accumulated: PassResult, seen: GradientSketches
) -> Sketches | None:
    """Returns a window that was listened to; None where the full batch's gradient, or all others, are zero."""
    used = torch.tensor(accumulated.weights, dtype=torch.float64, device="cpu")
    columns = _divide_by_weights(seen.columns(), used)

    def fetch(gradients: Gradients) -> torch.Tensor:
        return sketch(gradients.values(), experiment.ranks).to("cpu", torch.float64)

    window = Sketches(fetch(full.gradients), columns, used, fetch(accumulated.gradients))
    return window if bool(window.columns.any()) and bool(window.full.any()) else None


def _divide_by_weights(columns: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Returns the sketches of micro-batches before their weights; one with weight 0 has given zeros."""
    return columns / torch.where(used == 0, torch.ones_like(used), used)


class Sums:
    """Keeps a sketch of what has accumulated, after each backward pass of one run.

    The sketch is linear, so the difference of two is the sketch of one micro-batch's share.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._sums: list[torch.Tensor] = []

    def note(self, _: int) -> None:
        """Takes the sketch."""
        self._sums.append(sketch(take_gradients(self._experiment).values(), self._experiment.ranks))

    def shares(self, target: torch.Tensor, used: Sequence[float]) -> Sketches:
        """Returns the micro-batches' own gradients, by the weights that were used.

        Args:
            target: The sketch of the full batch's gradient.
            used: The micro-batch weights.
        """
        sums = self._sums
        # A model may lie on several devices, and each micro-batch reach other parts of it.
        if len({part.device for part in (target, *sums)}) > 1:  # some reached the parameters of one device only
            target, sums = target.cpu().double(), [part.cpu().double() for part in sums]
        steps = torch.stack([sums[0], *(b - a for a, b in pairwise(sums))], dim=1)
        weights = torch.tensor(used, dtype=steps.dtype, device=steps.device)
        return Sketches(target, _divide_by_weights(steps, weights), weights, sums[-1])


def fit_runs(runs: Sequence[Sketches]) -> WeightFit:
    """Returns the least-squares weights that explain all runs at once; each run counts relative to its own gradient.

        min ‖g_full − Σ c_k g_k‖

    Where c is not unique, the one nearest to the weights that were used is returned.
    """
    norms = [torch.linalg.vector_norm(run.full).clamp_min(TINY) for run in runs]
    columns = torch.cat([run.columns / norm for run, norm in zip(runs, norms, strict=True)])
    target = torch.cat([run.full / norm for run, norm in zip(runs, norms, strict=True)])
    # A small gradient leaves most of a sketch empty; its empty rows would make the fit look determined.
    equations = int((target != 0).logical_or(columns.any(1)).sum())
    fit = fit_weights(columns, target, weights=runs[0].used, singular=SINGULAR_FLOAT64, equations=equations)
    shares = runs[0].columns / norms[0] * torch.tensor(fit.weights, dtype=columns.dtype, device=columns.device)
    return replace(fit, noise=gradient_noise(shares))
