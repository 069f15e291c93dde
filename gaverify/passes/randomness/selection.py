"""Which rows of a full batch's draw belong to a micro-batch.

Shapes: N rows of the full batch and n of the micro-batch in a dimension whose size follows the batch; m = N / B where
rows are folded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gaverify.passes.layouts import SampleDimension, SampleLayout, changed_dimensions, take_entries
from gaverify.passes.randomness.draws import Draw, MicroBatch, differ, matching_rows

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
        least: How far fingerprints of one row may lie apart.
        order: The samples' places in the full batch, where they do not lie one behind the other: ranks take turns.
    """

    micro_batch: MicroBatch
    batch_size: int
    shape: torch.Size
    prints: torch.Tensor | None
    least: float
    order: tuple[int, ...] | None = None

    def entries_in(self, dimension: SampleDimension, device: torch.device) -> range | torch.Tensor:
        """Returns the rows of the samples in one dimension."""
        samples = range(*self.micro_batch) if self.order is None else self.order
        return dimension.entries_of(samples, self.batch_size, device)


def by_position(draw: Draw, rows: Rows, inner: bool) -> tuple[Selection | None, bool]:
    """Returns the rows at the samples' places, and whether that was a guess; None where shapes do not correspond."""
    full, micro = draw.value.shape, rows.shape
    start, stop = rows.micro_batch
    layout = SampleLayout.find(full, micro, rows.batch_size, stop - start)
    if layout is None:
        return None, False
    guessed, selection, device = False, Selection(), draw.value.device
    changed = layout.dimensions
    for dimension in changed:
        dim, fold = dimension.at, dimension.fold
        whole, part = full[dim], micro[dim]
        is_inner, unsure = _batch_is_inner(draw, rows, dimension, inner) if fold > 1 else (False, False)
        guessed = guessed or unsure
        if is_inner:
            selection.append((dim, rows.entries_in(replace(dimension, inner=True), device)))
        elif fold == 1 or (fold and (len(changed) > 1 or rows.order is not None)):
            selection.append((dim, rows.entries_in(dimension, device)))
        elif len(changed) == 1 and rows.order is not None:  # a selection of the samples: nobody knows whose rows
            return None, guessed
        elif len(changed) == 1 and (at := _offset(draw, start, part)) + part <= whole:
            selection.append((dim, range(at, at + part)))
        elif part < whole:
            selection.append((dim, range(part)))  # padded to the longest row of a shorter micro-batch
        else:
            return None, guessed
    return selection, guessed


def by_contents(draw: Draw, rows: Rows) -> Selection | None:
    """Returns the rows with the same contents, wherever they lie; None where there are none, or no way to tell."""
    full, micro = draw.value.shape, rows.shape
    if draw.prints is None or rows.prints is None or len(full) != len(micro):
        return None
    changed = changed_dimensions(full, micro)
    if not changed and not bool(differ(rows.prints, draw.prints, rows.least)):
        return []
    if len(changed) > 1 or any(dim >= draw.prints.dim() for dim in changed):
        return None
    dim = changed[0] if changed else 0
    matches = matching_rows(draw.prints, rows.prints, dim, draw.taken, rows.least)
    return [(dim, matches)] if matches is not None else None


def hand_out(draw: Draw, selection: Selection) -> None:
    """Notes that rows are given away: of rows with equal contents, each is handed out once."""
    if len(selection) == 1:
        _, rows = selection[0]
        device = draw.value.device
        draw.taken.append(torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, range) else rows)


def doubtful(draw: Draw, rows: Rows, selection: Selection) -> torch.Tensor | None:
    """Whether the selected rows were drawn for other contents, as a tensor; None where there is no way to tell."""
    if draw.prints is None or rows.prints is None or rows.prints.numel() == 0:
        return None
    if any(dim >= draw.prints.dim() for dim, _ in selection):
        return None
    expected = taken_from(draw.prints, selection)
    return differ(rows.prints, expected, rows.least) if expected.shape == rows.prints.shape else None


def taken_from(tensor: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Returns the selected rows of a tensor."""
    for dim, rows in selection:
        tensor = take_entries(tensor, dim, rows)
    return tensor


def _offset(draw: Draw, start: int, part: int) -> int:
    """The first row of rows that were selected out of the batch in its order; a repeated draw keeps its own."""
    if start not in draw.offsets:
        draw.offsets[start] = draw.dealt
        draw.dealt += part
    return draw.offsets[start]


def withdraw(draw: Draw, rows: Rows) -> None:
    """Takes back the rows at a running offset: others were found by their contents."""
    if draw.offsets.pop(rows.micro_batch[0], None) is not None:
        changed = changed_dimensions(draw.value.shape, rows.shape)
        draw.dealt -= rows.shape[changed[0]]


def _batch_is_inner(draw: Draw, rows: Rows, dimension: SampleDimension, inner: bool) -> tuple[bool, bool]:
    """Decides by the rows' contents; without them it is a guess, `inner`."""
    full, ours, dim = draw.prints, rows.prints, dimension.at
    if full is None or ours is None or not dim < full.dim() == ours.dim():
        return inner, True
    if full.select(dim, 0).shape != ours.select(dim, 0).shape:
        return inner, True
    outside = taken_from(full, [(dim, rows.entries_in(dimension, full.device))])
    inside = taken_from(full, [(dim, rows.entries_in(replace(dimension, inner=True), full.device))])
    far_inside, far_outside = float((ours - inside).norm()), float((ours - outside).norm())
    if far_inside == far_outside:  # rows that are all the same do not tell
        return inner, True
    return far_inside < far_outside, False
