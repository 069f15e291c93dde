"""Which module's output for the same samples depends on the batch that they came in?

Shapes: B samples, n of micro-batch k; every module call is kept as one fingerprint per sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gaverify.batching import leaves
from gaverify.gradients import Task, accumulated_gradients, full_batch_gradients
from gaverify.isolation import ModelState
from gaverify.probes.fingerprints import rows
from gaverify.randomness import DrawRecord

# In float64 rows agree to about 1e-12; a float32 fallback to about 1e-5. Faults lie far above (design, section 6).
_AGREE = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True)
class Coupling:
    """The first module whose inputs agree and whose output does not; `module` None: all module outputs agree."""

    module: str | None
    kind: str = ""
    difference: float = 0.0
    samples: int = 0
    batch_statistics: bool = False
    others: tuple[str, ...] = ()
    calls: int = 0


@dataclass
class _Call:
    """One module call: fingerprints of inputs and outputs by dimension, and whether it normalises per channel."""

    name: str
    kind: str
    inputs: list[dict[int, torch.Tensor]] = field(default_factory=list)
    outputs: list[dict[int, torch.Tensor]] = field(default_factory=list)
    affine: bool = False
    children: int = 0


class _Listener:
    """Takes fingerprints of every module call while it is attached."""

    def __init__(self, task: Task, divisors: set[int]) -> None:
        self._names = {module: name for root in task.modules for name, module in root.named_modules()}
        self._divisors = divisors
        self.calls: list[_Call] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        handle = nn.modules.module.register_module_forward_hook(self._hear)
        try:
            yield
        finally:
            handle.remove()

    def _hear(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in self._names:
            return
        call = _Call(self._names[module], type(module).__name__, children=len(list(module.children())))
        call.inputs = self._fingerprints(inputs)
        call.outputs = self._fingerprints(output)
        first = next((leaf for _, leaf in leaves(inputs) if isinstance(leaf, torch.Tensor)), None)
        if first is not None and isinstance(output, torch.Tensor):
            call.affine = per_channel_affine(first, output)
        self.calls.append(call)

    def _fingerprints(self, value: Any) -> list[dict[int, torch.Tensor]]:
        found = []
        for _, leaf in leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() > 0 and leaf.numel() > 0:
                dims = [dim for dim, size in enumerate(leaf.shape) if any(size % n == 0 for n in self._divisors)][:3]
                found.append({dim: rows(leaf, dim) for dim in dims})
        return found


def find_coupling(task: Task, state: ModelState, record: DrawRecord, *, lift: bool) -> Coupling:
    """Returns the innermost module that mixes samples, in the order of execution.

    Runs both strategies once more with every module's inputs and outputs fingerprinted.
    """
    whole = _Listener(task, {task.batch_size})
    with whole.attached():
        full, _ = full_batch_gradients(task, state, record, lift=lift)
    parts: list[list[_Call]] = []
    part = _Listener(task, set(task.sizes))

    def cut(_: int) -> None:
        parts.append(part.calls)
        part.calls = []

    with part.attached():
        accumulated_gradients(task, state, record, full, lift=lift, after_backward=cut)
    dtype = torch.float64 if lift else torch.float32
    return _first_coupled(task, whole.calls, parts, _AGREE[dtype])


def per_channel_affine(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the output is a·input + b with one (a, b) per channel, as a normalisation by batch statistics is."""
    if before.shape != after.shape or before.dim() < 2 or not after.is_floating_point():
        return False
    for channel in {1, before.dim() - 1}:
        x = before.detach().movedim(channel, 0).flatten(1).double()
        y = after.detach().movedim(channel, 0).flatten(1).double()
        if x.shape[1] < 3:
            continue
        x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
        slope = (x * y).sum(1, keepdim=True) / x.square().sum(1, keepdim=True).clamp_min(1e-300)
        unexplained = (y - slope * x).norm() / y.norm().clamp_min(1e-300)
        if float(unexplained) < 1e-5 and float(slope.std() if len(slope) > 1 else slope.abs().max()) > 0:
            return True
    return False


def _first_coupled(task: Task, whole: list[_Call], parts: list[list[_Call]], agree: float) -> Coupling:
    bounds = list(task.bounds())
    coupled: list[tuple[_Call, float, int]] = []
    for index, call in enumerate(whole):
        others = [part[index] if index < len(part) else None for part in parts]
        if any(other is None or other.name != call.name for other in others):
            break  # the micro-batches took another way through the model
        if _worst(call.inputs, [other.inputs for other in others if other], bounds, task.batch_size)[0] > agree:
            continue
        worst, samples = _worst(call.outputs, [other.outputs for other in others if other], bounds, task.batch_size)
        if worst > agree:
            coupled.append((call, worst, samples))
    # A container ends after its children: the first in this order is the innermost.
    if not coupled:
        return Coupling(None, calls=len(whole))
    call, worst, samples = coupled[0]
    return Coupling(
        call.name, call.kind, worst, samples, call.affine, tuple(c.name for c, _, _ in coupled[1:]), len(whole)
    )


def _worst(
    whole: list[dict[int, torch.Tensor]],
    parts: list[list[dict[int, torch.Tensor]]],
    bounds: list[tuple[int, int]],
    batch_size: int,
) -> tuple[float, int]:
    """The largest difference of any sample's fingerprint relative to the largest row, and how many samples differ."""
    worst, differing = 0.0, set()
    for position, kept in enumerate(whole):
        for dim, reference in kept.items():
            for (start, stop), part in zip(bounds, parts, strict=True):
                if position >= len(part) or dim not in part[position]:
                    continue
                fold, actual = len(reference) // batch_size, part[position][dim]
                if len(reference) % batch_size or len(actual) != fold * (stop - start):
                    continue
                expected = reference[start * fold : stop * fold]
                scale = reference[:, -1].max().clamp_min(1e-300)
                difference = (actual - expected).abs().amax(1) / scale
                if fold > 1 and _inner(reference, actual, fold, start, stop, batch_size) < difference.max():
                    continue
                worst = max(worst, float(difference.max()))
                differing |= {start + int(row) // fold for row in (difference > 1e-9).nonzero().flatten()}
    return worst, len(differing)


def _inner(reference: torch.Tensor, actual: torch.Tensor, fold: int, start: int, stop: int, size: int) -> float:
    """The difference when the folded dimension holds the batch as its inner index."""
    expected = reference.unflatten(0, (fold, size))[:, start:stop].flatten(0, 1)
    return float((actual - expected).abs().max() / reference[:, -1].max().clamp_min(1e-300))
