"""The problem to verify: a model, a loss and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Loss = Callable[[nn.Module, Any], Any]
Split = Callable[[Any, int, int], Any]


@dataclass
class Problem:
    """A model, a loss and a batch whose accumulated gradient is to be compared with its full-batch gradient.

    Args:
        model: Any `torch.nn.Module`; several modules go into one `nn.ModuleDict`.
        loss: `loss(model, batch)` runs the forward pass and returns the loss of exactly that (micro-)batch: a scalar
            tensor, or an object (or mapping) whose `.loss` is one.
        batch: The full batch: tensors, arrays, mappings, dataclasses, lists and tuples nested in each other.
        split: `split(batch, start, stop)` returns the samples `start` to `stop - 1` as a micro-batch; for batches that
            a plain slice of the leading dimension gets wrong (graphs, padding to the longest row).
        batch_size: B, where the leading dimensions do not tell it.
        name: How reports call it.
    """

    model: nn.Module
    loss: Loss
    batch: Any
    split: Split | None = None
    batch_size: int | None = None
    name: str | None = None
