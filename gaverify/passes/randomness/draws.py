"""The draws of a full-batch pass, the rows they were made for, and which of them belong to a micro-batch.

Fingerprints tell whose draw a row of a mask is, wherever the row lies. Shapes: a tensor of shape (*rows, C) has a
fingerprint of shape (*rows,); a vector is its own. W rows of the full batch's draw, P of the micro-batch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from gaverify.errors import HiddenDraw
from gaverify.passes.layouts import (
    SampleDimension,
    SampleLayout,
    changed_dimensions,
    project_rows,
    real_numbers,
    take_entries,
)
from gaverify.passes.randomness.foreign import ForeignDraw, call_site, foreign_states, record_draws, watch_generators
from gaverify.passes.randomness.operations import Drawing, draws_unseen
from gaverify.passes.randomness.packing import PackedRows, match_packed
from gaverify.tracebacks import hands_over

_PAIRS = 50_000_000  # W · P above which rows are not looked for
# How far fingerprints of one row may lie apart, relative to the largest: the rounding of what came before, in a batch
# of another size. Half-precision values agree to their 8 bits, and a few layers blur that.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
LOOSE = 0.1
"""The same where something before computes in lower precision than its result shows (autocast, casts)."""
_APART = 3.0  # under a loose tolerance, or none: how many times farther off every other row must be than the nearest
# The rounding of one row may be ten times that of half of the others, where a row's fingerprint is one number; two rows
# of one number each are nearer to each other than a thirtieth of what others are once in fifty times.
_ALIKE, _TINY_SHARE = 10.0, 30.0
_EQUAL = 8.0  # units in the last place within which two rows of one batch are equal: given in order


def fingerprint(source: torch.Tensor) -> torch.Tensor:
    """Returns one projection of every row of the last dimension."""
    values = real_numbers(source)
    values = values.to(torch.float64 if values.dtype is torch.float64 else torch.float32)
    return values if values.dim() < 2 else project_rows(values, 1).squeeze(-1)


def tolerance_of(source: torch.Tensor) -> float:
    """How far fingerprints of one row may lie apart, relative to the largest."""
    return _TOLERANCE.get(source.dtype.to_real(), LOOSE)


def rows_differ(ours: torch.Tensor, full: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Whether two sets of fingerprints are of different rows; a tensor, so that nothing waits for the device."""
    return (ours - full).abs().max() > tolerance * full.abs().max()


def match_rows(
    full: torch.Tensor, ours: torch.Tensor, dim: int, taken: Sequence[torch.Tensor], tolerance: float
) -> torch.Tensor | None:
    """Returns for each of our rows along `dim` the full batch's row of the same contents; None where one has none.

    Args:
        full: Fingerprints of the full batch's input.
        ours: Fingerprints of the micro-batch's; all other dimensions are the same.
        dim: The dimension of the rows.
        taken: Rows that other micro-batches were given: equal rows are given in order, each once.
        tolerance: As `tolerance_of` returns it.
    """
    full_rows, part = _project_along(full, dim), _project_along(ours, dim)
    if len(full_rows) * len(part) > _PAIRS or len(part) > len(full_rows):
        return None
    scale = float(full_rows.abs().max())
    free = torch.ones(len(full_rows), dtype=torch.bool, device=full_rows.device)
    for rows in taken:
        free[rows] = False
    equal = _EQUAL * torch.finfo(full_rows.dtype).eps * scale
    matches = []
    for row in part:
        at = _find_nearest(full_rows, row, free, tolerance * scale, equal)
        if at is None:
            return None
        free[at] = False
        matches.append(at)
    return torch.tensor(matches, dtype=torch.int64, device=full.device)


def _find_nearest(
    full_rows: torch.Tensor, row: torch.Tensor, free: torch.Tensor, allowed: float, equal: float
) -> int | None:
    """The first row that equals the nearest; None where none is near enough, or others are nearly as near."""
    distance = (full_rows - row).abs().amax(1).masked_fill(~free, torch.inf)
    at = int(distance.argmin())
    nearest = float(distance[at])
    if not nearest <= allowed:
        return None
    is_equal = ((full_rows - full_rows[at]).abs().amax(1) <= equal) & free
    # a tight tolerance tells rows apart by itself; under the loose one the nearest row has to stand out
    close = allowed <= max(_TOLERANCE.values()) * float(full_rows.abs().max())
    if not close and bool((distance[~is_equal] < _APART * nearest).any()):
        return None
    return int(is_equal.nonzero()[0])


def _project_along(prints: torch.Tensor, dim: int) -> torch.Tensor:
    """Two numbers per row along `dim`, of shape (rows, 2)."""
    return project_rows(prints.movedim(dim, 0).flatten(1) if prints.dim() > 1 else prints.unsqueeze(1))


MicroBatch = tuple[int, int]
"""The first sample of a micro-batch, and the first behind it."""


@dataclass(frozen=True)
class Draw:
    """One random operation of the full batch: its result, and what is needed to tell how the samples lie in it."""

    operation: str
    """Its name without overload or underscore: `randn`, `bernoulli`."""
    value: torch.Tensor
    """The drawn values; of a dropout the mask."""
    arguments: tuple[Any, ...]
    """Those on which the distribution depends."""
    input_shape: tuple[int, ...] | None
    """The shape of the tensor that it was drawn for; None where it was drawn for none."""
    prints: torch.Tensor | None = None
    """Fingerprints of the rows that it was drawn for; None where its input has another shape than its result."""
    tolerance: float = 0.0
    """How far fingerprints of one row may lie apart, relative to the largest."""
    site: int = 0
    """The place in the code that drew (`foreign.call_site`)."""
    packed: torch.Tensor | None = None
    """Sample and time step of each row, where as many rows were packed before."""


@dataclass(frozen=True)
class DrawLedger:
    """Every draw of a full-batch pass, in order. Dealing them to micro-batches changes nothing here."""

    draws: tuple[Draw, ...] = ()
    """The draws from torch's generators."""
    fused: frozenset[str] = frozenset()
    """Operations that draw inside a kernel, so that their draws were not seen."""
    foreign: tuple[ForeignDraw, ...] = ()
    """The draws from Python's and NumPy's global generators."""
    foreign_end: Mapping[str, Any] = field(default_factory=dict)
    """Generator's module → its state after the full batch; empty where `foreign` is."""

    @property
    def count(self) -> int:
        """How many draws the full batch made."""
        return len(self.draws) + len(self.foreign)

    def at(self, site: int, *, foreign: bool = False) -> list[int]:
        """Returns the indices of the draws that were made at a place, in order."""
        return self._sites.get(~site if foreign else site, [])

    @cached_property
    def _sites(self) -> dict[int, list[int]]:
        """Call site → indices into `draws`; complement of a call site → indices into `foreign`."""
        sites: dict[int, list[int]] = {}
        for index, draw in enumerate(self.draws):
            sites.setdefault(draw.site, []).append(index)
        for index, foreign_draw in enumerate(self.foreign):
            sites.setdefault(~foreign_draw.site, []).append(index)
        return sites


def place_draw(
    indices: Sequence[int], site: int, at: int, micro_batch: MicroBatch, made: Mapping[MicroBatch, Mapping[int, int]]
) -> int | None:
    """Returns which of the full batch's draws of one place a micro-batch's draw number `at` of that place is.

        as many draws as the full batch made, or none    once per forward (or per expert that is used)
        together as many as the full batch made          a loop over samples; the samples before ours drew before us

    Args:
        indices: The full batch's draws of that place, in order.
        site: The place.
        at: How many draws the micro-batch made there before.
        micro_batch: Which micro-batch.
        made: How many draws each micro-batch makes there.

    Returns:
        The draw's index; None where neither holds.
    """
    counts = {micro: numbers.get(site, 0) for micro, numbers in made.items()}
    if all(count in (0, len(indices)) for count in counts.values()):
        return indices[at] if at < len(indices) else None
    if sum(counts.values()) == len(indices):
        before = sum(count for micro, count in counts.items() if micro < micro_batch)
        return indices[before + at] if before + at < len(indices) else None
    return None


class DrawRecorder:
    """Handles the random operations of the full batch: keeps each result.

    Args:
        ends_at_hidden: Whether a draw inside a kernel ends the pass, by `HiddenDraw`.
    """

    def __init__(self, *, ends_at_hidden: bool = False) -> None:
        self.packed = PackedRows()
        self._ends_at_hidden = ends_at_hidden
        self.has_ended = False
        self.known: dict[Any, torch.Size] = {}  # by the generator's state before the draw: what shape was drawn
        self._draws: list[Draw] = []
        self._fused: set[str] = set()
        self._foreign: list[ForeignDraw] = []
        self._foreign_end: dict[str, Any] = {}

    @property
    def ledger(self) -> DrawLedger:
        """The draws so far."""
        return DrawLedger(tuple(self._draws), frozenset(self._fused), tuple(self._foreign), dict(self._foreign_end))

    @hands_over
    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: torch.Tensor | None = None
    ) -> Any:
        """Runs the operation and keeps what it drew; `like` is what the tensor that is drawn into was made after."""
        run = Drawing(func, args, kwargs, like)
        if run.drawn is None:
            if run.has_moved or draws_unseen(func, args, kwargs):
                self._fused.add(run.operation)
                if self._ends_at_hidden:
                    self.has_ended = True
                    raise HiddenDraw
        elif self.known.get(run.before) != run.drawn.shape and (run.has_moved or run.drawn.numel() == 0):
            self.known[run.before] = run.drawn.shape
            shape = tuple(run.source.shape) if run.source is not None else None
            prints = fingerprint(run.source) if run.source is not None and shape == run.drawn.shape else None
            tolerance = tolerance_of(run.source) if run.source is not None else 0.0
            value = run.drawn.detach().to(torch.bool if run.kind.mask else run.drawn.dtype, copy=True)
            packed = self.packed.find(run.drawn.shape)
            asked = run.kind.asked(args)
            self._draws.append(Draw(run.operation, value, asked, shape, prints, tolerance, call_site(), packed))
        return run.result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps Python's and NumPy's draws, and where the pass leaves their generators."""
        with watch_generators(record_draws(self._foreign)):
            yield
        if self._foreign:
            self._foreign_end = foreign_states()


# Which rows of a full batch's draw belong to a micro-batch.
#
# Shapes: N rows of the full batch and n of the micro-batch in a dimension whose size follows the batch; m = N / B
# where rows are folded.


Selection = list[tuple[int, range | torch.Tensor]]
"""Per dimension the rows to take; a dimension that does not follow the batch is not named."""


@dataclass(frozen=True)
class Rows:
    """Facts about the rows that a micro-batch draws for.

    Args:
        micro_batch: Its samples.
        batch_size: B.
        shape: The shape of its draw.
        prints: Fingerprints of the rows, where there are any.
        tolerance: How far fingerprints of one row may lie apart.
        order: The samples' places in the full batch, where they do not lie one behind the other: ranks take turns.
        packed: Sample and time step of each row, where as many rows were packed before.
    """

    micro_batch: MicroBatch
    batch_size: int
    shape: torch.Size
    prints: torch.Tensor | None
    tolerance: float
    order: tuple[int, ...] | None = None
    packed: torch.Tensor | None = None

    def entries_in(self, dimension: SampleDimension, device: torch.device) -> range | torch.Tensor:
        """Returns the rows of the samples in one dimension."""
        samples = range(*self.micro_batch) if self.order is None else self.order
        return dimension.entries_of(samples, self.batch_size, device)

    @property
    def packed_in_batch(self) -> torch.Tensor | None:
        """Returns the same as `packed`, with the samples' numbers in the full batch."""
        if self.packed is None:
            return None
        samples = range(*self.micro_batch) if self.order is None else self.order
        places = torch.tensor(samples, device=self.packed.device)
        return torch.stack([places[self.packed[:, 0]], self.packed[:, 1]], dim=1)


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
    """The rows that micro-batches have been given afterwards."""


def select_by_position(draw: Draw, rows: Rows, inner: bool, given: GivenRows) -> Position:
    """Returns the rows at the samples' places.

    Args:
        draw: The full batch's draw.
        rows: The micro-batch's rows.
        inner: Whether the batch is the inner index of a folded dimension, where contents do not tell.
        given: The rows that micro-batches were given before.
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


def select_packed(draw: Draw, rows: Rows) -> Selection | None:
    """Returns the rows of the same time steps of the same samples; None where they are no rows of packed sequences."""
    ours = rows.packed_in_batch
    if draw.packed is None or ours is None or draw.value.shape[1:] != rows.shape[1:]:
        return None
    matches = match_packed(draw.packed, ours)
    return [(0, matches.to(draw.value.device))] if matches is not None else None


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


def are_rounded(draw: Draw, rows: Rows, selection: Selection) -> torch.Tensor | None:
    """Whether rounding explains how far rows are from the selected ones, on their device; None where nothing tells.

    How much is rounded before a draw, its dtype does not tell (TF32, autocast). But rows of other samples are as far
    off as the full batch's rows are from their neighbours; and among rows that are not, a pair that was exchanged is
    farther off than the others are.
    """
    if draw.prints is None or rows.prints is None or len(selection) != 1:
        return None
    ((dim, _),) = selection
    expected = take_selection(draw.prints, selection)
    distances = _row_norms(rows.prints - expected, dim)
    typical_distance = _row_norms(draw.prints - draw.prints.roll(1, dim), dim).median()
    farthest = distances.max()
    is_rounded: torch.Tensor = (_APART * farthest < typical_distance) & (
        farthest <= torch.maximum(_ALIKE * distances.median(), typical_distance / _TINY_SHARE)
    )
    return is_rounded


def _row_norms(differences: torch.Tensor, dim: int) -> torch.Tensor:
    rows = differences.movedim(dim, 0).reshape(differences.shape[dim], -1)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def have_equal_contents(draw: Draw, selection: Selection) -> torch.Tensor:
    """Whether rows that were found by their contents have others with the same contents: then these do not tell."""
    ((dim, chosen),) = selection
    assert draw.prints is not None
    rows = _project_along(draw.prints, dim)
    equal = _EQUAL * torch.finfo(rows.dtype).eps * rows.abs().max()
    distances = (rows[chosen].unsqueeze(1) - rows).abs().amax(2)
    return (distances <= equal).sum(1).max() > 1


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
