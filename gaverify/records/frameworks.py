"""What a framework does to a script's losses before it differentiates them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Framework(str, Enum):
    """Frameworks that accumulate gradients themselves."""

    TRANSFORMERS = "transformers"
    ACCELERATE = "accelerate"
    LIGHTNING = "lightning"


@dataclass(frozen=True)
class FrameworkLoop:
    """How a framework accumulates in the loop that it runs."""

    framework: Framework
    """Which framework."""
    steps: int
    """K, the number of micro-batches that its user set."""
    divides: bool = True
    """Whether it divides each loss by K."""
    counts_items: bool | None = False
    """Whether transformers' Trainer gives the loss the number of targets; None if its version cannot."""
