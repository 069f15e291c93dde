"""Finds the element of a gradient that differs most."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gaverify.passes.devices import widest
from gaverify.records.comparison import Element

_SLICE = 1 << 18  # elements whose difference is held at a time


def worst_elements(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], shapes: Sequence[tuple[int, ...]]
) -> list[Element]:
    """Returns the worst element of every pair (expected, actual), after one transfer per device for all of them.

    Args:
        pairs: Gradients as real numbers, not empty; complex ones as pairs of real numbers in a last dimension.
        shapes: Of the parameters: an index counts complex elements once.
    """
    devices: dict[torch.device, list[int]] = {}
    for at, (expected, _) in enumerate(pairs):
        devices.setdefault(expected.device, []).append(at)
    found: dict[int, Element] = {}
    for numbers in devices.values():
        table = torch.stack([_worst(*pairs[at]) for at in numbers]).tolist()
        for at, (index, expected, actual) in zip(numbers, table, strict=True):
            parts = 2 if pairs[at][0].dim() > len(shapes[at]) else 1
            found[at] = Element(_unravelled(int(index) // parts, shapes[at]), expected, actual)
    return [found[at] for at in range(len(pairs))]


def _worst(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Flat index, expected and actual value of the element with the largest difference. Shape (3)."""
    wide = widest(expected.device)
    parts = []
    for start, (e, a) in enumerate(zip(*(side.reshape(-1).split(_SLICE) for side in (expected, actual)), strict=True)):
        if e.dtype in (torch.bfloat16, torch.float16):
            e, a = e.float(), a.float()
        largest, index = (a - e).abs_().max(dim=0, keepdim=True)
        numbers = (largest, index + start * _SLICE, e.take(index), a.take(index))
        parts.append(torch.cat([number.to(wide) for number in numbers]))
    table = torch.stack(parts)
    best = table.index_select(0, table[:, 0].argmax(keepdim=True))  # an index on the host would wait for the device
    return best[0, 1:]


def _unravelled(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    result = []
    for size in reversed(shape):
        result.append(index % size)
        index //= size
    return tuple(reversed(result))
