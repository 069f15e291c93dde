"""Does a module scale its channels, as a normalisation by statistics of the batch does?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gaverify.batching import leaves
from gaverify.gradients import PassProbe, forward_pass
from gaverify.probes.controls import Bench

_UNEXPLAINED = 1e-5  # what a·x + b may leave over of an output before it counts as something else


def normalises_channels(bench: Bench, path: str) -> bool:
    """Returns whether the outputs of the module at `path` are a·input + b with one (a, b) per channel."""
    modules = {name: module for root in bench.task.modules for name, module in root.named_modules()}
    listener = _Listener(modules[path])
    forward_pass(bench.task, bench.state, bench.record, None, lift=bench.lift, probe=bench.with_probe(listener))
    return listener.affine


def per_channel_affine(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether `after` is a·`before` + b with one (a, b) per channel, the slopes not all alike."""
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
        if float(unexplained) < _UNEXPLAINED and float(slope.std() if len(slope) > 1 else slope.abs().max()) > 0:
            return True
    return False


class _Listener(PassProbe):
    """Looks at the input and output of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.affine = False

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Listens for the length of a forward."""
        handle = self._module.register_forward_hook(self._hear)
        try:
            yield
        finally:
            handle.remove()

    def _hear(self, _: nn.Module, inputs: Any, output: Any) -> None:
        first = next((leaf for _, leaf in leaves(inputs) if isinstance(leaf, torch.Tensor)), None)
        if first is not None and isinstance(output, torch.Tensor):
            with torch._C.DisableTorchFunction():
                self.affine = self.affine or per_channel_affine(first, output)
