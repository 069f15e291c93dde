"""Leads a run along the full-batch run: its optimizers step with that run's gradients, and have its buffers after it.

The accumulated run's own gradients are recorded first. Then its optimizers are given the full batch's for the one step,
so that its next update starts from the full-batch run's weights and optimizer state, and is judged for what it does
itself. What the step makes of the same gradients is compared as well: a step that divides by K shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from gaverify.audit.recording.keeping import copied
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.values import plain
from gaverify.audit.recording.watching import Watched


class Lead:
    """Puts the full-batch run's gradients in place for a step, and the script's own back after it.

    Args:
        source: The folder of the full-batch run; None leads nothing.
    """

    def __init__(self, source: Path | None) -> None:
        self._source = source
        self._lent: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []

    def lend(self, entry: Watched) -> bool:
        """Puts the gradients of the same step of the same optimizer in place; returns whether it could."""
        path = self._source / f"gradients-{entry.index}-{entry.steps}.pt" if self._source is not None else None
        if path is None or not path.exists() or getattr(entry.optimizer, "grad_scale", None) is not None:
            return False
        stored = torch.load(path, mmap=True, weights_only=True)
        parameters = entry.sample.parameters
        lent = [_placed(parameter, stored.get(at)) for at, parameter in enumerate(parameters)]
        if any(new is None and at in stored for at, new in enumerate(lent)):
            return False
        for parameter, new in zip(parameters, lent, strict=True):
            self._lent.append((parameter, parameter.grad, new))
            parameter.grad = new
        return True

    def put_back(self) -> bool:
        """Puts back what the script had, but where the step or a hook of it has removed or replaced the gradient.

        Returns:
            Whether the step was led.
        """
        led = bool(self._lent)
        for parameter, own, new in self._lent:
            if parameter.grad is new:
                parameter.grad = own
        self._lent = []
        return led


def _placed(parameter: torch.Tensor, stored: torch.Tensor | None) -> torch.Tensor | None:
    """A stored gradient where the parameter is; None where it does not fit."""
    if stored is None or type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if stored.shape != parameter.shape or stored.dtype is not (
        parameter.dtype if parameter.grad is None else parameter.grad.dtype
    ):
        return None
    return stored.to(parameter.device)


class Buffers:
    """Keeps what a step leaves in the buffers of the script's models, or puts the full-batch run's there.

    Running statistics, queues and power iterations go on after each micro-batch, so that a later update would start
    from other buffers than the full batch's and be judged for what an earlier one did.

    Args:
        source: The folder of the full-batch run; None where this is that run.
    """

    def __init__(self, source: Path | None) -> None:
        self._source = source
        self._known: dict[str, torch.Tensor | None] = {}  # as they were when they were last seen

    def know(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Takes buffers as they are before the first forward: what never changes is not written."""
        for name, buffer in buffers.items():
            if name not in self._known:
                self._known[name] = copied(buffer)

    def keep(self, storage: Storage, step: str, buffers: Mapping[str, torch.Tensor]) -> None:
        """Writes the buffers that have changed since they were last written."""
        readable = {name: value for name, buffer in buffers.items() if (value := plain(buffer)) is not None}
        changed = {name: value for name, value in readable.items() if self._changed(name, value)}
        if changed:
            storage.tensors(f"buffers-{step}", changed)
        self._known |= {name: copied(value) for name, value in changed.items()}

    def put(self, step: str, buffers: Mapping[str, torch.Tensor]) -> None:
        """Puts in place what the full-batch run's buffers were after the same step."""
        path = self._source / f"buffers-{step}.pt" if self._source is not None else None
        if path is None or not path.exists():
            return
        for name, value in torch.load(path, map_location="cpu", mmap=True, weights_only=True).items():
            own = plain(buffers[name]) if name in buffers else None
            if own is not None and own.shape == value.shape and own.dtype is value.dtype:
                own.copy_(value)

    def _changed(self, name: str, value: torch.Tensor) -> bool:
        before = self._known.get(name)
        if before is None or before.shape != value.shape or before.dtype is not value.dtype:
            return True
        return not torch.equal(value, before)
