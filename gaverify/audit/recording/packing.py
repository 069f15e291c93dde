"""Masks as eight elements per byte: those of a large batch would cost a quarter of its activations on disk."""

from __future__ import annotations

import math
from typing import Any

import torch

_GATHER = 0x8040201008040201 - (1 << 64)  # moves bit 8 i to bit 63 - i
_EIGHTS = torch.tensor(
    [[at >> (7 - bit) & 1 for bit in range(8)] for at in range(256)], dtype=torch.uint8, device="cpu"
)
_EIGHTS = _EIGHTS.view(torch.int64).flatten()


def packed(value: torch.Tensor) -> Any:
    """Returns a mask as eight elements per byte, with its shape and device; anything else as it is."""
    if value.dtype is not torch.bool:
        return value
    flat = torch.nn.functional.pad(value.detach().cpu().flatten(), (0, -value.numel() % 8))
    eights = flat.view(torch.uint8).view(torch.int64)  # eight bytes of 0 or 1; the product gathers them in the last
    return ((eights * _GATHER) >> 56).to(torch.uint8), tuple(value.shape), value.device


def unpacked(stored: Any) -> Any:
    """Returns what `packed` was given."""
    if isinstance(stored, torch.Tensor):
        return stored
    bits, shape, device = stored
    eights = _EIGHTS[bits.to(torch.int64)]
    return eights.view(torch.uint8).view(torch.bool)[: math.prod(shape)].view(shape).to(device)
