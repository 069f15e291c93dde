"""One update of the script: what its window held, and what its optimizers were given."""

from __future__ import annotations

from typing import Any

import torch

from gaverify.audit.recording.names import Names
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.watching import Watch, Watched

_BUFFER = 4096  # elements of a buffer that are kept


class Update:
    """Steps of different optimizers with no backward between them are one update.

    Args:
        number: From 1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps: list[int] = []
        self.rows: list[dict[str, Any]] = []
        self.increments: list[dict[int, torch.Tensor]] = []
        self._final: dict[int, torch.Tensor] = {}
        self._stretches: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._after: dict[str, Any] = {"weights": {}, "buffers": {}, "lrs": {}}

    def joins(self, optimizer: int) -> bool:
        """Whether a step of this optimizer still belongs to this update; a forward or backward has ended it before."""
        return optimizer not in self.steps

    def capture(self, entry: Watched, names: Names, storage: Storage | None) -> None:
        """Takes what the optimizer is about to use; gradients go to disk at once."""
        scale = getattr(entry.optimizer, "grad_scale", None)  # a fused optimizer divides by it itself
        self.steps.append(entry.index)
        self._final[entry.index] = entry.gradients / float(scale) if scale is not None else entry.gradients
        self._stretches[entry.index] = entry.sample.stretches()
        self._before[entry.index] = entry.weights
        if storage is None:
            return
        gradients = {}
        for ordinal, parameter in enumerate(entry.sample.parameters):
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.detach() / scale if scale is not None else gradient.detach()
                gradients[names.key(parameter, entry.index, ordinal)] = gradient
        storage.tensors(f"gradients-{self.number}-{entry.index}", gradients)

    def stepped(self, watch: Watch, optimizer: int, buffers: dict[str, torch.Tensor]) -> None:
        """Takes weights, learning rates and buffers after the step."""
        entry = watch.of(optimizer)
        self._after["weights"][optimizer] = entry.weights
        self._after["lrs"][optimizer] = [float(group.get("lr", 0.0)) for group in entry.optimizer.param_groups]
        self._after["buffers"] = {
            name: buffer.detach().reshape(-1)[:_BUFFER].to("cpu", torch.float64)
            for name, buffer in buffers.items()
            if buffer.layout is torch.strided and not buffer.is_complex()
        }

    def write(self, storage: Storage) -> None:
        """Writes the samples and rows of the window."""
        content = {"increments": self.increments, "final": self._final, "stretches": self._stretches,
                   "before": self._before}  # fmt: skip
        storage.tensors(f"samples-{self.number}", {**content, **self._after})
        storage.tensors(f"rows-{self.number}", self.rows)
