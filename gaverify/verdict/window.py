"""Decides a window below float32 without a float64 control of the whole batch: by its gradients' sketches.

    weights     g_full ≈ Σ w_k g_k with the weights that were used, and no other weights explain what is left
    structure   a few samples in float64, at once and one by one: a fault of structure shows in any few samples
    the rest    ‖g_full − Σ w_k g_k‖, held against what the same few samples differ by in working precision, at once and
                one by one: that is rounding, since float64 says that they agree

Rounding is not coherent with the micro-batches' gradients, and a wrong weight is nothing else: so c is known better
than any single parameter is (one weight of four that is 3 % off is seen in bfloat16, where parameters are 2 to 90 %
apart). Moving every weight by a unit roundoff is no measure of rounding below float32: it moves a bfloat16 gradient by
10 to 90 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gaverify.errors import ProblemError
from gaverify.passes.gradients import Gradients, PassResult, accumulated_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.lifting import LiftedWeights
from gaverify.passes.nesting import leaves
from gaverify.passes.precision import coarsest_unit
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.sketches import sketch, sketch_of
from gaverify.passes.task import Task
from gaverify.passes.weight_fit import SINGULAR_FLOAT64, fit_weights
from gaverify.records.compared import FewSamples
from gaverify.records.comparison import Outcome
from gaverify.thresholds import CAPPED_UNITS, COHERENT, GROUPINGS, LOST_UNITS, SHOWS_GROUPINGS, U32
from gaverify.tracebacks import hands_over
from gaverify.verdict.control import in_float64

WORTH, WORTH_SAMPLES = 1 << 16, 1024
"""Elements of parameters and batch, or samples, from which on a part is cheaper than what it saves."""
# Samples that are looked into: an eighth of the batch, four at most and two at least. Two show a fault of structure as
# well as any number does; four still do where two of them are alike.
_SAMPLES, _SHARE, _LEAST = 4, 8, 2


class GradientSketches:
    """Sketches what each backward pass gives every parameter, before it is added to `.grad`.

    Args:
        task: Whose parameters are listened to.
        release: Free each gradient once it is sketched, so that there is never a set of them.
    """

    def __init__(self, task: Task, *, release: bool = False) -> None:
        self._parameters = list(task.parameters.values())
        self._release = release
        self._now: torch.Tensor | None = None
        self.taken: list[torch.Tensor] = []

    @contextmanager
    def listening(self, *, hooked: bool = True) -> Iterator[Callable[[int], None]]:
        """Listens, and gives what is to be called after each backward pass; others tell it where it is not hooked."""
        parameters = self._parameters if hooked else []
        handles = [p.register_hook(partial(self.seen, place)) for place, p in enumerate(parameters)]
        if self._release:
            handles += [p.register_post_accumulate_grad_hook(_freed) for p in parameters]
        try:
            yield self._take
        finally:
            for handle in handles:
                handle.remove()

    @hands_over
    def seen(self, place: int, gradient: torch.Tensor) -> None:
        """Sketches a gradient of the parameter at a place; several of one parameter add up."""
        with _disable_current_modes(), torch.no_grad():
            found = sketch_of(gradient, place)
            self._now = found if self._now is None else self._now + found.to(self._now.device)

    def _take(self, _: int) -> None:
        self.taken.append(self._now.to("cpu", torch.float64) if self._now is not None else torch.zeros(1, device="cpu"))
        self._now = None

    def columns(self) -> torch.Tensor:
        """What each backward pass gave, shape (S, passes), in float64 on the host; zeros where it gave nothing."""
        width = max(len(column) for column in self.taken)
        zeros = torch.zeros(width, dtype=torch.float64, device="cpu")
        return torch.stack([column if len(column) == width else zeros for column in self.taken], 1)


def _freed(parameter: torch.Tensor) -> None:
    parameter.grad = None


@dataclass(frozen=True)
class Window:
    """A window in sketches, in float64 on the host. Shapes: K micro-batches, S numbers for a gradient.

    `full` (S,) of the full batch, `columns` (S, K) of each micro-batch before its weight, `used` (K,) the weights,
    `accumulated` (S,) what was in `.grad` in the end.
    """

    full: torch.Tensor
    columns: torch.Tensor
    used: torch.Tensor
    accumulated: torch.Tensor

    @property
    def rest(self) -> torch.Tensor:
        """What the weights that were used leave of the full batch's gradient, shape (S,)."""
        return self.full - self.columns @ self.used

    @property
    def fitted(self) -> tuple[float, ...]:
        """The weights that fit best."""
        return fit_weights(self.columns, self.full, singular=SINGULAR_FLOAT64, weights=self.used).weights

    def relative(self, part: torch.Tensor) -> float:
        """The norm of a sketch over that of the full batch's gradient."""
        return float(torch.linalg.vector_norm(part) / torch.linalg.vector_norm(self.full))


def window_of(full: PassResult, accumulated: PassResult, seen: GradientSketches) -> Window | None:
    """Returns a window that was listened to; None where the full batch's gradient, or another, is zero."""
    used = torch.tensor(accumulated.weights, dtype=torch.float64, device="cpu")
    found = Window(_sketch(full.gradients), seen.columns() / used, used, _sketch(accumulated.gradients))
    return found if len(found.columns) == len(found.full) and bool(found.full.any()) else None


def _sketch(gradients: Gradients) -> torch.Tensor:
    return sketch(list(gradients.values())).to("cpu", torch.float64)


def worth(task: Task) -> bool:
    """Whether a batch is so large that float64 on all of it costs more than what a part of it shows."""
    return elements(task) >= WORTH or task.batch_size >= WORTH_SAMPLES


def elements(task: Task) -> int:
    """Numbers in the parameters and the batch together."""
    tensors = [leaf for _, leaf in leaves(task.problem.batch) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() for tensor in (*task.parameters.values(), *tensors))


def told(
    task: Task, state: ModelState, record: DrawRecord, full: PassResult, window: Window
) -> tuple[Outcome, FewSamples] | None:
    """Returns what a window's weights, and a few of its samples, show; None where these have no gradient.

    Divergent is what no rounding of these samples explains: a part of the batch, or all of it, then tells in float64.

    Args:
        task: What was run.
        state: Of the model before the passes.
        record: The draws, all of them dealt.
        full: The full-batch pass.
        window: Its gradients in sketches.

    Raises:
        Exception: Whatever a kernel without float64, or a model that takes no single sample, raises.
    """
    few = _few(task, state, record, full)
    if few is None:
        return None
    fitted = torch.tensor(window.fitted, dtype=torch.float64, device="cpu")
    rest, coherent = window.relative(window.rest), window.relative(window.columns @ (fitted - window.used))
    lost = window.relative(window.accumulated - window.columns @ window.used)
    off = float((fitted / window.used - 1).abs().max())
    few = replace(few, rest=rest, weights=off, lost=lost, allowed=GROUPINGS * few.rounding + lost)
    unit = coarsest_unit(parameter.dtype for parameter in task.parameters.values())
    added_up = lost <= LOST_UNITS * unit * math.sqrt(task.steps)
    alike = few.structure <= CAPPED_UNITS * U32
    if added_up and alike and coherent <= COHERENT * rest and rest <= GROUPINGS * few.rounding:
        return Outcome.EQUIVALENT, few
    shows = rest > SHOWS_GROUPINGS * max(few.rounding, few.error)
    return Outcome.DIVERGENT if shows else Outcome.INCONCLUSIVE, few


def _in_float64(task: Task, state: ModelState, sketches: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
    """The sketches in float64, with weights that are lifted as they are used; in a copy where that does not go."""
    with suppress(ProblemError), in_float64(task, state, weights=False) as (lifted, there):
        return sketches(lifted, there, lift=True, hooked=False)
    with in_float64(task, state) as (lifted, there):
        return sketches(lifted, there, lift=True)


def _few(task: Task, state: ModelState, record: DrawRecord, full: PassResult) -> FewSamples | None:
    """What the first samples show; None where they have no gradient.

    Where they have not the same one, at once and one by one, in float64, their error stands for their rounding.
    """
    count = max(_LEAST, min(_SAMPLES, task.batch_size // _SHARE))
    cuts = [(count,), (1,) * count]
    dealt = replace(record, used=set(), made={})  # what these runs do with the draws is nothing to report

    def sketches(task: Task, state: ModelState, *, lift: bool = False, hooked: bool = True) -> list[torch.Tensor]:
        """The gradient of all samples at once (S, 1), and those of each (S, samples)."""
        found = []
        for sizes in cuts:
            seen = GradientSketches(task, release=True)
            probe = None if hooked else LiftedWeights(task, seen.seen)
            part = replace(task, sizes=sizes, weighting=[1.0] * len(sizes))
            with seen.listening(hooked=hooked) as note:
                accumulated_gradients(part, state, dealt, full, lift=lift, after_backward=note, probe=probe)
            found.append(seen.columns())
        return found

    task.progress(f"{count} samples")
    at_once, singles = sketches(task, state)
    here = at_once[:, 0]
    task.progress(f"float64: {count} samples")
    at_once, exact_singles = _in_float64(task, state, sketches)
    exact = at_once[:, 0]
    norm = float(torch.linalg.vector_norm(exact))
    if not math.isfinite(norm) or norm == 0.0:
        return None
    fit = fit_weights(exact_singles, exact, singular=SINGULAR_FLOAT64, weights=torch.ones_like(exact[:count]))
    shares = exact.new_tensor(fit.weights)
    structure = float(torch.linalg.vector_norm(exact - exact_singles @ shares)) / norm
    error = float(torch.linalg.vector_norm(here - exact)) / norm
    apart = float(torch.linalg.vector_norm(here - singles @ shares)) / norm
    return FewSamples(count, structure, apart if structure <= CAPPED_UNITS * U32 else error, error)
