"""Which rows of a full batch's draw belong to a micro-batch.

Shapes: N rows of the full batch and n of the micro-batch in a dimension whose size follows the batch; m = N / B where
rows are folded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from gaverify.passes.layouts import SampleDimension, SampleLayout, changed_dimensions, take_entries
from gaverify.passes.randomness.draws import Draw, MicroBatch, match_rows, rows_differ

Selection = list[tuple[int, range | torch.Tensor]]
"""Per dimension the rows to take; a dimension that does not follow the batch is not named."""


@dataclass(frozen=True)
class Rows:
    """What is known about the rows that a micro-batch draws for.

    Args:
        micro_batch: Its samples.
        batch_size: B.
        shape: The shape of its draw.
        prints: Fingerprints of the rows, where there are any.
        tolerance: How far fingerprints of one row may lie apart.
        order: The samples' places in the full batch, where they do not lie one behind the other: ranks take turns.
    """

    micro_batch: MicroBatch
    batch_size: int
    shape: torch.Size
    prints: torch.Tensor | None
    tolerance: float
    order: tuple[int, ...] | None = None

    def entries_in(self, dimension: SampleDimension, device: torch.device) -> range | torch.Tensor:
        """Returns the rows of the samples in one dimension."""
        samples = range(*self.micro_batch) if self.order is None else self.order
        return dimension.entries_of(samples, self.batch_size, device)


@dataclass(frozen=True)
class GivenRows:
    """Which rows of one draw the micro-batches of a pass were given so far.

    Rows that a graph's nodes or a selection drew do not lie at a fixed multiple of the sample's number: those of one
    micro-batch follow those of the micro-batch before.
    """

    starts: Mapping[int, int] = field(default_factory=dict)
    """First sample of a micro-batch → where its rows begin; a repeated draw keeps its own."""
    count: int = 0
    """How many rows were given at such a running offset."""
    taken: tuple[torch.Tensor, ...] = ()
    """Rows that were given in the second reading: of rows with equal contents, each is given once."""

    def begin(self, micro_batch: MicroBatch, count: int) -> tuple[int, GivenRows]:
        """Returns where a micro-batch's rows begin, and what is given once it has them."""
        start = micro_batch[0]
        if start in self.starts:
            return self.starts[start], self
        return self.count, replace(self, starts={**self.starts, start: self.count}, count=self.count + count)

    def withdraw(self, draw: Draw, rows: Rows) -> GivenRows:
        """Returns it without the rows at a running offset: others were found by their contents."""
        start = rows.micro_batch[0]
        if start not in self.starts:
            return self
        changed = changed_dimensions(draw.value.shape, rows.shape)
        starts = {first: row for first, row in self.starts.items() if first != start}
        return replace(self, starts=starts, count=self.count - rows.shape[changed[0]])

    def take(self, draw: Draw, selection: Selection) -> GivenRows:
        """Returns it with rows that are given away."""
        if len(selection) != 1:
            return self
        _, rows = selection[0]
        device = draw.value.device
        entries = torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, range) else rows
        return replace(self, taken=(*self.taken, entries))


class Position(NamedTuple):
    """The rows at the samples' places; None where shapes do not correspond."""

    selection: Selection | None
    guessed: bool
    """Whether the order of folded rows is a guess."""
    given: GivenRows
    """What the micro-batches have been given afterwards."""


def select_by_position(draw: Draw, rows: Rows, inner: bool, given: GivenRows) -> Position:
    """Returns the rows at the samples' places.

    Args:
        draw: The full batch's draw.
        rows: The micro-batch's rows.
        inner: Whether the batch is the inner index of a folded dimension, where contents do not tell.
        given: What micro-batches were given before.
    """
    full, micro = draw.value.shape, rows.shape
    start, stop = rows.micro_batch
    layout = SampleLayout.find(full, micro, rows.batch_size, stop - start)
    if layout is None:
        return Position(None, False, given)
    guessed, selection, device = False, Selection(), draw.value.device
    changed = layout.dimensions
    for dimension in changed:
        dim, fold = dimension.at, dimension.fold
        full_size, size = full[dim], micro[dim]
        is_inner, unsure = _batch_is_inner(draw, rows, dimension, inner) if fold > 1 else (False, False)
        guessed = guessed or unsure
        if is_inner:
            selection.append((dim, rows.entries_in(replace(dimension, inner=True), device)))
        elif fold == 1 or (fold and (len(changed) > 1 or rows.order is not None)):
            selection.append((dim, rows.entries_in(dimension, device)))
        elif len(changed) == 1 and rows.order is not None:  # a selection of the samples: nobody knows whose rows
            return Position(None, guessed, given)
        else:
            at = full_size  # several dimensions follow the batch: no running offset in one of them
            if len(changed) == 1:
                at, given = given.begin(rows.micro_batch, size)
            if at + size <= full_size:
                selection.append((dim, range(at, at + size)))
            elif size < full_size:
                selection.append((dim, range(size)))  # padded to the longest row of a shorter micro-batch
            else:
                return Position(None, guessed, given)
    return Position(selection, guessed, given)


def select_by_contents(draw: Draw, rows: Rows, given: GivenRows) -> Selection | None:
    """Returns the rows with the same contents, wherever they lie; None where there are none, or nothing tells."""
    full, micro = draw.value.shape, rows.shape
    if draw.prints is None or rows.prints is None or len(full) != len(micro):
        return None
    changed = changed_dimensions(full, micro)
    if not changed and not bool(rows_differ(rows.prints, draw.prints, rows.tolerance)):
        return []
    if len(changed) > 1 or any(dim >= draw.prints.dim() for dim in changed):
        return None
    dim = changed[0] if changed else 0
    matches = match_rows(draw.prints, rows.prints, dim, given.taken, rows.tolerance)
    return [(dim, matches)] if matches is not None else None


def have_other_contents(draw: Draw, rows: Rows, selection: Selection) -> torch.Tensor | None:
    """Whether the selected rows were drawn for other contents, on their device; None where nothing tells."""
    if draw.prints is None or rows.prints is None or rows.prints.numel() == 0:
        return None
    if any(dim >= draw.prints.dim() for dim, _ in selection):
        return None
    expected = take_selection(draw.prints, selection)
    return rows_differ(rows.prints, expected, rows.tolerance) if expected.shape == rows.prints.shape else None


def take_selection(tensor: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Returns the selected rows of a tensor."""
    for dim, rows in selection:
        tensor = take_entries(tensor, dim, rows)
    return tensor


def _batch_is_inner(draw: Draw, rows: Rows, dimension: SampleDimension, inner: bool) -> tuple[bool, bool]:
    """Decides by the rows' contents; without them it is a guess, `inner`."""
    full, ours, dim = draw.prints, rows.prints, dimension.at
    if full is None or ours is None or not dim < full.dim() == ours.dim():
        return inner, True
    if full.select(dim, 0).shape != ours.select(dim, 0).shape:
        return inner, True
    outside = take_selection(full, [(dim, rows.entries_in(dimension, full.device))])
    inside = take_selection(full, [(dim, rows.entries_in(replace(dimension, inner=True), full.device))])
    far_inside, far_outside = float((ours - inside).norm()), float((ours - outside).norm())
    if far_inside == far_outside:  # rows that are all the same do not tell
        return inner, True
    return far_inside < far_outside, False
