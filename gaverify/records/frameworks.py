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
    """How a framework accumulates in the loop that it runs.

    Attributes:
        framework: Which one it is.
        steps: The micro-batches of a window, as its user set them.
        divides: Whether it divides each loss by them.
        counts_items: Whether it hands the number of the window's targets to the loss; None where its version never
            does. Of others than the Trainer of transformers it is False.
    """

    framework: Framework
    steps: int
    divides: bool = True
    counts_items: bool | None = False
