"""Which time step of which sample each row of a packed sequence is.

Time steps of equal contents cannot be told apart by their contents. The operation that packs them tells: it is given
lengths in descending order, and what sorted these says which sample each of them belongs to.

Shapes: B samples, T time steps of the longest; N rows of a packed sequence, one for each time step of each sample.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch

from gaverify.passes.calls import operation_name

_PACKS = "_pack_padded_sequence"
_PASSES_ON = ("_to_copy", "clone", "detach", "alias")
_NOTED = frozenset({_PACKS, *_PASSES_ON, "sort", "index", "index_select"})


@cache
def tells_rows(func: Any) -> bool:
    """Whether an operation packs sequences, or may put their lengths into another order."""
    return operation_name(func) in _NOTED


class PackedRows:
    """The packed sequences of one forward, as the operations that made them tell."""

    def __init__(self) -> None:
        # A tensor that is gone may leave its id to another one.
        self._orders: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._by_count: dict[int, torch.Tensor] = {}

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Notes in what order lengths stand, and what is packed by them."""
        name = operation_name(func)
        if name == _PACKS:
            order = self._order_of(args[1])
            rows = _list_rows(result[1], order)
            self._by_count[len(rows)] = rows
        elif isinstance(args[0], torch.Tensor) and args[0].dim() == 1:
            self._note_order(name, args, result)

    def _note_order(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        before, moved, chosen = self._order_of(args[0]), result, None
        if name == "sort":
            moved, chosen = result[0], result[1]
        elif name == "index_select":
            chosen = args[2]
        elif name == "index":
            chosen = args[1][0]
        if chosen is None:
            order = before
        elif chosen.dim() == 1 and chosen.dtype is torch.int64:
            order = chosen if before is None else before[chosen]
        else:
            order = None
        if order is not None:
            self._orders[id(moved)] = weakref.ref(moved), order

    def _order_of(self, lengths: torch.Tensor) -> torch.Tensor | None:
        reference, order = self._orders.get(id(lengths), (None, None))
        return order if reference is not None and reference() is lengths else None

    def find(self, shape: torch.Size) -> torch.Tensor | None:
        """Returns sample and time step of each row of a tensor, shape (N, 2); None where so many were not packed."""
        return self._by_count.get(shape[0]) if shape else None


def _list_rows(sizes: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Returns sample and time step of each row.

    Args:
        sizes: How many samples reach each time step, shape (T,).
        order: The sample at each place of the sorted lengths; None where they stand in the samples' order.
    """
    device = sizes.device
    steps = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
    places = torch.cat([torch.arange(size, device=device) for size in sizes.tolist()])
    samples = places if order is None else order.to(device)[places]
    return torch.stack([samples, steps], dim=1)


def match_packed(full: torch.Tensor, ours: torch.Tensor) -> torch.Tensor | None:
    """Returns the full batch's row for each of a micro-batch's; None where one is not there.

    Args:
        full: Sample and time step of the full batch's rows, shape (N, 2).
        ours: The same of the micro-batch's; samples by their number in the full batch.
    """
    stride = 1 + int(torch.cat([full, ours])[:, 1].max())
    numbers, wanted = (rows[:, 0] * stride + rows[:, 1] for rows in (full, ours))
    ordered, places = numbers.sort()
    at = torch.searchsorted(ordered, wanted).clamp(max=len(ordered) - 1)
    return places[at] if bool((ordered[at] == wanted).all()) else None
