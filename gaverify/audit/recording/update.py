"""One update of the script: what its window held, and what its optimizers were given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gaverify.audit.recording.settings import counted_steps, rates_of, settings_of
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.values import plain
from gaverify.audit.recording.watching import Watched

_BUFFER = 4096  # elements of a buffer that are kept


@dataclass
class Forward:
    """A forward of the script: its number in the run, where its rows are stored, and all weights when it began."""

    number: int
    update: int
    position: int
    weights: dict[int, torch.Tensor] = field(default_factory=dict)


class Update:
    """Steps of different optimizers with no backward between them are one update.

    Args:
        number: From 1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: list[dict[str, Any]] = []
        self._steps: dict[int, dict[str, Any]] = {}

    @property
    def steps(self) -> list[int]:
        """The optimizers that have stepped."""
        return list(self._steps)

    def joins(self, optimizer: int) -> bool:
        """Whether a step of this optimizer still belongs to this update; a forward or backward has ended it before."""
        return optimizer not in self._steps

    def capture(self, entry: Watched, forwards: Sequence[Forward], storage: Storage | None) -> None:
        """Takes what the optimizer is about to use; gradients go to disk at once.

        Where they are no longer what the window's last backward pass left, those are stored too.
        """
        scale = getattr(entry.optimizer, "grad_scale", None)  # a fused optimizer divides by it itself
        divisor = 1.0 if scale is None else float(scale)
        parameters, summed = entry.sample.parameters, entry.summed
        changed = summed is not None and summed.differs(parameters, entry.gradients)
        self._steps[entry.index] = {
            "update": self.number,
            "increments": [(part.backward, part.change) for part in entry.increments],
            "final": entry.gradients / divisor,
            "summed": summed.sampled / divisor if summed is not None and changed else None,
            "stretches": entry.sample.stretches(),
            "sizes": entry.sample.sizes,
            "before": entry.weights,
            "forwards": [(forward.update, forward.position) for forward in forwards],
            "start": forwards[0].weights if forwards else {},
        }
        if storage is None:
            return
        name = f"{entry.index}-{entry.steps}"
        gradients = [None if parameter.grad is None else plain(parameter.grad) for parameter in parameters]
        storage.tensors(f"gradients-{name}", _present(gradients, divisor))
        if changed and summed is not None:
            storage.tensors(f"summed-{name}", _present(summed.gradients, divisor))

    def stepped(self, entry: Watched, buffers: dict[str, torch.Tensor], led: bool) -> None:
        """Takes weights, settings and buffers after the step.

        Args:
            entry: The optimizer.
            buffers: Of the script's models.
            led: Whether the step used the full-batch run's gradients.
        """
        self._steps[entry.index] |= {
            "weights": entry.weights,
            "lrs": rates_of(entry.optimizer),
            "settings": settings_of(entry.optimizer),
            "counted": counted_steps(entry.optimizer),
            "led": led,
            "buffers": {
                name: values.reshape(-1)[:_BUFFER].to("cpu", torch.float64)
                for name, buffer in buffers.items()
                if (values := plain(buffer)) is not None and values.layout is torch.strided and not values.is_complex()
            },
        }

    def write(self, storage: Storage, steps: dict[int, int]) -> None:
        """Writes the samples and rows of the window.

        Args:
            storage: Where to.
            steps: The number of each optimizer's step.
        """
        for optimizer, content in self._steps.items():
            storage.tensors(f"step-{optimizer}-{steps[optimizer]}", content)
        storage.tensors(f"rows-{self.number}", self.rows)


def _present(gradients: Sequence[torch.Tensor | None], divisor: float) -> dict[int, torch.Tensor]:
    """Gradients by the position of their parameter; the optimizer's own scale is taken out."""
    return {
        at: gradient if divisor == 1.0 else gradient / divisor
        for at, gradient in enumerate(gradients)
        if gradient is not None
    }
