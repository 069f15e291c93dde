"""How the gradient of the full batch is made to fit into memory."""

from __future__ import annotations

from enum import Enum


class Reference(str, Enum):
    """The ways to run the full batch's forward and backward; the values are what specs and JSON say.

    `AUTO` is only ever asked for: it stands for the first of the others, in this order, that fits.
    """

    FULL = "full"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    AUTO = "auto"

    def __str__(self) -> str:
        """The value, as in documents."""
        return str(self.value)
