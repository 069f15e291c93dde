"""Control runs: both strategies again, with a suspect neutralised in both.

A suspect is the cause when the difference falls to rounding without it. Matching the forward of one run alone proves
nothing (design, section 6), so every control here changes the full batch and the micro-batches alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gaverify.comparison import measure
from gaverify.gradients import Gradients, PassProbe, PassResult, Task, accumulated_gradients, full_batch_gradients
from gaverify.isolation import ModelState
from gaverify.measurements import ControlRun
from gaverify.probes.holding import ControlFailed, rows_for
from gaverify.probes.micro_batch_weights import Sketches, fitted, sketched
from gaverify.randomness import DrawRecord

# What rounding leaves: 4 u of float32 where a cast inside the model hides from the lift, far less in pure float64;
# without a float64 control the runs carry float32 rounding themselves.
ROUNDING_FLOAT64, ROUNDING_FLOAT32 = 2.4e-7, 1e-4


@dataclass(frozen=True)
class Bench:
    """Where control runs happen: the task in the deciding precision, its state, its draws."""

    task: Task
    state: ModelState
    record: DrawRecord
    lift: bool
    neutral: tuple[PassProbe, ...] = ()

    def with_probe(self, probe: PassProbe | None) -> PassProbe | None:
        """Returns `probe` together with what has been neutralised already."""
        probes = (*self.neutral, *((probe,) if probe is not None else ()))
        return Composed(probes) if probes else None

    @property
    def rounding(self) -> float:
        """The relative difference that rounding explains."""
        return ROUNDING_FLOAT64 if self.lift or self._double else ROUNDING_FLOAT32

    @property
    def _double(self) -> bool:
        return all(p.dtype in (torch.float64, torch.complex128) for p in self.task.parameters.values())

    def run(self, what: str, probe: PassProbe | None = None, *, fit: bool = False) -> ControlRun:
        """Runs both strategies and returns what difference is left, with the weights that fit on request."""
        self.task.progress(f"control: {what}")
        probe = self.with_probe(probe)
        full, _ = full_batch_gradients(self.task, self.state, self.record, lift=self.lift, probe=probe)
        if not _any(full.gradients):
            raise ControlFailed(f"with {what} every gradient is zero, so that nothing is left to compare")
        right = None
        if fit:
            sketches, accumulated = self.sketched(full, probe)
            right = fitted([sketches])
        else:
            accumulated = accumulated_gradients(self.task, self.state, self.record, full, lift=self.lift, probe=probe)
        left = relative_difference(accumulated.gradients, full.gradients)
        return ControlRun(what, left, left <= self.rounding, right)

    def sketched(
        self, full: PassResult, probe: PassProbe | None, *, release: bool = False
    ) -> tuple[Sketches, PassResult]:
        """Accumulates once more, with a sketch of every micro-batch's gradient."""
        return sketched(self.task, self.state, self.record, full, lift=self.lift, probe=probe, release=release)


def _any(gradients: Gradients) -> bool:
    present = (g.to_dense() if g.layout is not torch.strided else g for g in gradients.values() if g is not None)
    return any(bool(gradient.any()) for gradient in present)


def relative_difference(accumulated: Gradients, reference: Gradients) -> float:
    """Returns ‖accumulated − reference‖ / ‖reference‖ over all parameters; infinite where they cannot be compared."""
    total = difference = 0.0
    for row in measure(accumulated, reference):
        if row.reason.startswith("unused"):
            continue
        if math.isnan(row.difference):
            return math.inf
        total, difference = total + row.reference**2, difference + row.difference**2
    return math.sqrt(difference / total) if total > 0 else math.inf


class Evaluated(PassProbe):
    """Holds modules in `eval` mode: statistics are frozen, and both runs use the stored ones."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Switches the modules for the length of a pass."""
        flags = [(module, module.training) for root in self._modules for module in root.modules()]
        try:
            for root in self._modules:
                root.eval()
            yield
        finally:
            for module, flag in flags:
                module.training = flag


class Composed(PassProbe):
    """Several probes at once; the last one's backward is used."""

    def __init__(self, probes: Sequence[PassProbe]) -> None:
        self._probes = tuple(probes)

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Enters all of them, the first outermost."""
        with ExitStack() as stack:
            for probe in self._probes:
                stack.enter_context(probe.around(k))
            yield

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Leaves the backward to the last probe."""
        self._probes[-1].backward(k, loss, weight)


class _Cut(PassProbe):
    """Cuts the forward at the outputs of module calls: leaves in the full batch, cotangents in the micro-batches."""

    def __init__(self, task: Task, inside: frozenset[int]) -> None:
        self._task, self._inside = task, inside
        self._bounds = list(task.bounds())
        self._calls = -1
        self._stack: list[int] = []
        self._k: int | None = None
        self.leaves: list[torch.Tensor] = []
        self._closed = False  # a recomputation during the backward calls modules again
        self._outputs: list[torch.Tensor] = []

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Watches the module calls of one forward."""
        self._k, self._calls, self._stack, self._outputs, self._closed = k, -1, [], [], False
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """In a micro-batch the full batch's cotangents take the loss's place."""
        self._closed = True
        if k is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        if len(self._outputs) != len(self.leaves):
            raise ControlFailed("the micro-batches call other modules than the full batch")
        start, stop = self._bounds[k]
        pairs = [
            (output, rows_for(leaf, output, start, stop, self._task.batch_size, leaf.grad))
            for output, leaf in zip(self._outputs, self.leaves, strict=True)
            if leaf.grad is not None
        ]
        torch.autograd.backward([output for output, _ in pairs], [cotangent for _, cotangent in pairs])

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._closed:
            return
        self._calls += 1
        self._stack.append(self._calls)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> Any:
        if self._closed:
            return None
        call = self._stack.pop()
        if call in self._inside or not all(parent in self._inside for parent in self._stack):
            return None
        return self._cut(output)

    def _cut(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.requires_grad:
                return value
            if self._k is None:
                self.leaves.append(value.detach().requires_grad_())
                return self.leaves[-1]
            self._outputs.append(value)
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._cut(entry) for entry in value))
        if isinstance(value, list | tuple):
            return type(value)(self._cut(entry) for entry in value)
        if isinstance(value, dict):
            changed = value.copy()
            for key, entry in value.items():
                changed[key] = self._cut(entry)
            return changed
        return value


def cached_gradients(bench: Bench, inside: frozenset[int]) -> ControlRun:
    """Runs the two-pass cached gradient: the loss once on all outputs, the model backward per micro-batch.

        1. forward of the full batch, cut at module outputs y; v = ∂ loss / ∂ y; the loss's own parameters directly
        2. per micro-batch: forward, backward of y_k with cotangent v_k

    Args:
        bench: Where to run.
        inside: The module calls that hold the loss itself and are opened (none where the loss is outside the model).

    Source: L. Gao, Y. Zhang, J. Han, J. Callan, Scaling Deep Contrastive Learning Batch Size under Memory Limited
    Setup, 2021, section 3.
    """
    # one backward over the summed losses would leave no place for the cotangents
    task = replace(bench.task, strategy="accumulate")
    task.progress("control: cached gradients")
    full, _ = full_batch_gradients(task, bench.state, bench.record, lift=bench.lift, probe=bench.with_probe(None))
    cut = _Cut(task, inside)
    probe = bench.with_probe(cut)
    direct, _ = full_batch_gradients(task, bench.state, bench.record, lift=bench.lift, probe=probe)
    if not cut.leaves:
        raise ControlFailed("no module output takes part in the loss")
    parts = accumulated_gradients(task, bench.state, bench.record, full, lift=bench.lift, probe=probe)
    total: Gradients = {}
    for name, gradient in parts.gradients.items():
        own = direct.gradients[name]
        total[name] = own if gradient is None else gradient if own is None else gradient + own
    left = relative_difference(total, full.gradients)
    return ControlRun("cached gradients", left, left <= bench.rounding)
