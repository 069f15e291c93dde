"""Tensors that a run stores for the audit: samples of every step, and fingerprints of the rows of every forward.

The script's process writes them, the audit and the processes of later runs read them. Events and closing records are
described in `gaverify.records.events`.

Shapes: S sampled elements of an optimizer's gradients or weights; B rows of T steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class StepSample:
    """The sampled elements of one optimizer at one of its steps."""

    final: torch.Tensor
    """Gradients that the optimizer used, shape (S,)."""
    before: torch.Tensor
    """Weights before the step, shape (S,)."""
    stretches: torch.Tensor
    """Number of elements of its parameter that each sampled element stands for, shape (S,)."""
    summed: torch.Tensor | None = None
    """Gradients as the window's last backward pass left them, shape (S,); None where the optimizer used these."""
    weights: torch.Tensor | None = None
    """Weights after the step, shape (S,); None where the step did not end."""
    sizes: tuple[int, ...] = ()
    """Number of sampled elements of each parameter; they add up to S."""
    increments: tuple[tuple[int, torch.Tensor], ...] = ()
    """Number of each backward pass of the window, and what it added, shape (S,)."""
    forwards: tuple[tuple[int, int], ...] = ()
    """Update of each forward that these passes reached, and its position in that update."""
    update: int = 1
    """Number of the update."""
    by_change: bool = False
    """Whether the change of the weights stands for a gradient that was not seen."""
    settings: tuple[dict[str, float], ...] = ()
    """Numbers among the settings of each parameter group after the step."""
    counted: float | None = None
    """Number of steps that the optimizer itself has counted; None where it counts none."""
    led: bool = False
    """Whether the step used the full-batch run's gradients."""
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The first elements of each buffer, `model:name`, after the step."""


@dataclass(frozen=True)
class Fingerprints:
    """The rows of one tensor, along one of its dimensions, as hashes."""

    hash: torch.Tensor
    """Running hash of each row after each of its steps, shape (B, T); (B, 1) for rows that are hashed whole."""
    tail: torch.Tensor | None = None
    """First step of each row from which all steps are equal, shape (B,); None for rows that are hashed whole."""
    hash_left: torch.Tensor | None = None
    """The running hashes from the last step to the first, shape (B, T)."""
    tail_left: torch.Tensor | None = None
    """The same as `tail`, from the last step to the first."""
    projections: torch.Tensor | None = None
    """Two projections and the norm of each row, shape (B, 3); None for integers."""
    shape: tuple[int, ...] = ()
    """Shape of the tensor."""
    second: Fingerprints | None = None
    """The rows along the second dimension; None where there is none."""
    readings: Mapping[str, Fingerprints] = field(default_factory=dict)
    """The rows with the contents of other inputs in place of numbers that may count these, by what they may count."""


ForwardInputs = Mapping[str, Fingerprints]
"""The input tensors of one forward, by their paths."""


def read_step(path: Path) -> StepSample:
    """Reads a sample of a step, which was stored as it is."""
    # A file of this class and tensors alone; anything else in it is refused.
    with torch.serialization.safe_globals([StepSample]):
        sample: StepSample = torch.load(path, weights_only=True)
    return sample


def read_rows(path: Path) -> Sequence[ForwardInputs]:
    """Reads the inputs of the forwards of one update, which were stored as they are."""
    # As for samples of steps: a kept record that holds any other class is refused.
    with torch.serialization.safe_globals([Fingerprints]):
        rows: Sequence[ForwardInputs] = torch.load(path, weights_only=True)
    return rows
