"""Did both runs see the same samples in a window? Samples and fingerprints that a run stores, and their comparison.

Which samples of the full batch a micro-batch holds is found by content, too, as order alone may not tell.

Shapes: one row per sample; rows of length T, whose first t steps have the running hash `hash[t - 1]`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gaverify.passes.layouts import changed_dimensions
from gaverify.records.audit import RowCheck
from gaverify.thresholds import COMPUTED_FLOAT32, TINY

# Tensors that a run stores for the audit: samples of every step, and fingerprints of the rows of every forward.
#
# The script's process writes them, the audit and the processes of later runs read them. Events and closing records
# are described in `gaverify.records.events`.
#
# Shapes: S sampled elements of an optimizer's gradients or weights; B rows of T steps.


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
    from_whole: tuple[torch.Tensor, ...] = ()
    """`final` and `summed` of gradients in shards, at the elements that a process with whole parameters samples, zero
    where this one does not hold them; empty without shards."""
    sizes: tuple[int, ...] = ()
    """Number of sampled elements of each parameter; they add up to S."""
    increments: tuple[tuple[int, torch.Tensor], ...] = ()
    """Number of each backward pass of the window, and what it added, shape (S,)."""
    forwards: tuple[tuple[int, int], ...] = ()
    """Update of each forward that these passes reached, and its position in that update."""
    update: int = 1
    """Number of the update."""
    settings: tuple[dict[str, float], ...] = ()
    """Numbers among the settings of each parameter group after the step."""
    counted: float | None = None
    """Number of steps that the optimizer itself has counted; None where it counts none."""
    led: bool = False
    """Whether the step used the full-batch run's gradients."""
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The first elements of each buffer, `model:name`, after the step."""


@dataclass(frozen=True)
class StoredGradients:
    """The gradients of one optimizer at one of its steps, by the place of their parameter; float64 but for values.

    Shapes: W buckets of a sketch.
    """

    values: Mapping[int, torch.Tensor]
    """Gradients of small parameters, or their shards, as they are."""
    sketches: Mapping[int, torch.Tensor]
    """Sketches of the others, shape (W,); those of shards add up."""
    norms: Mapping[int, float]
    """Norms of what was sketched."""


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


def read_gradients(path: Path) -> StoredGradients:
    """Reads the gradients of a step, which were stored as they are."""
    with torch.serialization.safe_globals([StoredGradients]):
        stored: StoredGradients = torch.load(path, weights_only=True)
    return stored


def read_rows(path: Path) -> Sequence[ForwardInputs]:
    """Reads the inputs of the forwards of one update, which were stored as they are."""
    # As for samples of steps: a kept record that holds any other class is refused.
    with torch.serialization.safe_globals([Fingerprints]):
        rows: Sequence[ForwardInputs] = torch.load(path, weights_only=True)
    return rows


# Did both runs see the same samples in a window? Compares fingerprints of rows, whatever they were padded to.


_ENTRY = re.compile(r" \(\d+\)$")


_SHIFTS = (0, 1)
"""Steps that a row may have lost: `ids[:, :-1]`, the input of a next-token loss, takes its last token from the longest
row of a micro-batch, and padding from the others. Rows that have lost none are paired first: "ann" is no "anne"."""


Side = tuple[list[int], int]
"""The running hashes of a row, and after how many steps only equal ones follow."""


@dataclass
class FingerprintedRow:
    """One row of a tensor, as its fingerprints: read from the left and from the right, and its projections."""

    sides: tuple[Side, Side]
    projections: list[float] | None

    @property
    def contents(self) -> tuple[int, int]:
        """The row's length and hash, which two rows share if they hold the same values."""
        hashes, _ = self.sides[0]
        return len(hashes), hashes[-1]


def check_rows(
    full: Sequence[ForwardInputs], accumulated: Sequence[ForwardInputs], *, distinct: bool = False
) -> RowCheck:
    """Compares the rows of every input tensor of a window, over all its forwards and in any order.

    A tensor that is the same in every forward of both runs, although one has more forwards, holds no samples.

    Args:
        full: The forwards of the full-batch run.
        accumulated: Those of the accumulated run.
        distinct: Equal rows of a run count once.
    """
    by_path_full, by_path = _by_path(full), _by_path(accumulated)
    worst = RowCheck(0, 0, checked=False)
    for path in by_path_full.keys() & by_path.keys():
        check = _check(path, by_path_full[path], by_path[path], distinct=distinct)
        if check is None:
            continue
        if check.differing:
            check = _read_as_pointers(path, by_path_full[path], by_path[path]) or check
        # A later input without padding must not hide that an earlier one was padded, whichever of them is the worst.
        padded = check.padded or worst.padded
        worst = check if not worst.checked or check.differing > worst.differing else worst
        worst = replace(worst, padded=padded)
    return worst


def _by_path(forwards: Sequence[ForwardInputs]) -> dict[str, list[Fingerprints]]:
    by_path: dict[str, list[Fingerprints]] = {}
    for forward in forwards:
        for path, rows in forward.items():
            # The entries of a list may be the samples: the lists of the two runs then differ in length.
            by_path.setdefault(_ENTRY.sub("", path), []).append(rows)
    return by_path


def _check(
    path: str, full: list[Fingerprints], accumulated: list[Fingerprints], *, distinct: bool = False
) -> RowCheck | None:
    shapes = {rows.shape for rows in [*full, *accumulated]}
    contents = {tuple(rows.hash[:, -1].tolist()) for rows in [*full, *accumulated]}
    if len(shapes) == len(contents) == 1 and len(full) != len(accumulated):
        return None  # a mask, a table of positions: the same in every forward
    # Sequences may come as (T, B): the dimension that accumulation cut holds the samples.
    dim = _batch_dimension(full, accumulated)
    full_rows, micro_rows = rows_of(full, dim), rows_of(accumulated, dim)
    if distinct:
        full_rows, micro_rows = (list({row.contents: row for row in rows}.values()) for rows in (full_rows, micro_rows))
    full_counts, micro_counts = (Counter(row.contents for row in rows) for rows in (full_rows, micro_rows))
    shared = full_counts & micro_counts
    full_left, micro_left = _without(full_rows, shared), _without(micro_rows, shared)
    exactly = len(full_left)
    # Tokenizers pad on the right or on the left, to the longest row of a batch: the full batch's rows are often longer.
    for shift in _SHIFTS:
        for side in (0, 1):
            full_left, micro_left = _pair_padded(full_left, micro_left, side, shift)
    padded = len(full_left) < exactly
    full_left, micro_left = _to_rounding(full_left, micro_left)
    return RowCheck(len(full_rows), len(micro_rows), max(len(full_left), len(micro_left)), path, padded)


def _read_as_pointers(path: str, full: list[Fingerprints], accumulated: list[Fingerprints]) -> RowCheck | None:
    """The check with numbers that count rows within a batch read as what they count, where all rows then agree."""
    for reading in sorted({reading for rows in [*full, *accumulated] for reading in rows.readings}):
        # The same box has image number 3 in a batch of 8 and number 0 in a micro-batch.
        sides = [[rows.readings.get(reading, rows) for rows in side] for side in (full, accumulated)]
        check = _check(path, *sides)
        # A reading that leaves some rows differing proves nothing: labels may look like numbers of rows by chance.
        if check is not None and not check.differing:
            return check
    return None


def _batch_dimension(full: list[Fingerprints], accumulated: list[Fingerprints]) -> int:
    """The first of the two leading dimensions that accumulation made smaller; 0 where neither changed."""
    leading = min(2, *(len(rows.shape) for rows in [*full, *accumulated]))
    sizes = [[{rows.shape[dim] for rows in side} for dim in range(leading)] for side in (full, accumulated)]
    return next(iter(changed_dimensions(*sizes)), 0)


def rows_of(entries: list[Fingerprints], dim: int) -> list[FingerprintedRow]:
    """Returns the rows of several fingerprinted tensors along one of their two leading dimensions."""
    rows = []
    for entry in entries:
        prints = entry.second if dim else entry
        if prints is None:
            raise ValueError("a tensor of one dimension has no rows along the second")
        from_right = prints.hash if prints.hash_left is None else prints.hash_left
        sides = zip(_sides(prints.hash, prints.tail), _sides(from_right, prints.tail_left), strict=True)
        projections = prints.projections.tolist() if prints.projections is not None else [None] * len(prints.hash)
        rows += [FingerprintedRow(*row) for row in zip(sides, projections, strict=True)]
    return rows


def _sides(hashes: torch.Tensor, tails: torch.Tensor | None) -> list[Side]:
    """Returns the rows as they are read from one side."""
    if tails is None:  # hashed whole: the one hash is the row's only step
        return [(hash_, 1) for hash_ in hashes.tolist()]
    return list(zip(hashes.tolist(), tails.tolist(), strict=True))


def alike(row: FingerprintedRow, other: FingerprintedRow, shift: int = 0) -> bool:
    """Whether two rows hold the same sample, whatever each was padded to and with what shift."""
    return row.contents == other.contents or any(
        _goes_on(*sides, shift) for sides in zip(row.sides, other.sides, strict=True)
    )


def _without(rows: list[FingerprintedRow], paired: Counter[tuple[int, int]]) -> list[FingerprintedRow]:
    unpaired, open_rows = [], paired.copy()
    for row in rows:
        # A row that one run holds twice and the other once is paired once: samples that repeat have to repeat in both.
        if open_rows[row.contents] > 0:
            open_rows[row.contents] -= 1
        else:
            unpaired.append(row)
    return unpaired


def _pair_padded(
    full: list[FingerprintedRow], accumulated: list[FingerprintedRow], side: int, shift: int
) -> tuple[list[FingerprintedRow], list[FingerprintedRow]]:
    """Pairs rows of different length whose shorter one is the beginning of the longer, and the rest is padding."""
    candidates, unpaired = list(accumulated), []
    for row in full:
        partner = next(
            (at for at, candidate in enumerate(candidates) if _goes_on(row.sides[side], candidate.sides[side], shift)),
            None,
        )
        if partner is None:
            unpaired.append(row)
        else:
            # Two short rows may both be beginnings of one long row: each row can be paired only once.
            del candidates[partner]
    return unpaired, candidates


def _goes_on(one: Side, other: Side, shift: int = 0) -> bool:
    """Whether the longer of two rows begins with the shorter, and what is behind that and the shift is constant."""
    # The long row has to be constant from where the short one ends: else it holds another sample.
    (short, _), (long, tail) = sorted((one, other), key=lambda side: len(side[0]))
    return tail <= len(short) + shift < len(long) and long[len(short) - 1] == short[-1]


def _to_rounding(
    full: list[FingerprintedRow], accumulated: list[FingerprintedRow]
) -> tuple[list[FingerprintedRow], list[FingerprintedRow]]:
    """Pairs rows that were computed and agree only to rounding."""
    full_computed, micro_computed = (
        [row for row in rows if row.projections is not None] for rows in (full, accumulated)
    )
    if not full_computed or not micro_computed:
        return full, accumulated
    a, b = (
        torch.tensor([row.projections for row in rows], dtype=torch.float64, device="cpu")
        for rows in (full_computed, micro_computed)
    )
    # Projections of rows with large values round by more: the norm in the third column tells how much is rounding.
    scale = torch.maximum(a[:, 2:].abs(), b[:, 2:].abs().T).clamp_min(TINY)
    close = torch.cdist(a, b, p=float("inf")) / scale < COMPUTED_FLOAT32
    paired: set[int] = set()
    for row, near in zip(full_computed, close, strict=True):
        partners = (id(micro_computed[at]) for at in near.nonzero().flatten().tolist())
        # Without this, two rows near the same one would both count as that one, and a missing sample would not show.
        partner = next((candidate for candidate in partners if candidate not in paired), None)
        if partner is not None:
            paired |= {id(row), partner}
    full_left, micro_left = ([row for row in rows if id(row) not in paired] for rows in (full, accumulated))
    return full_left, micro_left


class Spot(NamedTuple):
    """Where the rows of a micro-batch lie: a forward of the full-batch run, and their places in it."""

    forward: int
    places: tuple[int, ...]

    @property
    def is_scattered(self) -> bool:
        """Whether they do not lie one behind the other: ranks take turns, or a batch holds two views of each sample."""
        return self.places != tuple(range(self.places[0], self.places[0] + len(self.places)))


class Matcher:
    """Finds the rows of micro-batches in the forwards of one update of the full-batch run, each spot once.

    Args:
        forwards: The fingerprints of each forward's inputs.
    """

    def __init__(self, forwards: Sequence[ForwardInputs]) -> None:
        self._forwards = forwards
        self._rows = cache(self._read)
        self._taken: set[Spot] = set()

    def find(self, among: Sequence[int], micro_batch: ForwardInputs) -> Spot | None:
        """Returns where a micro-batch lies in one of the forwards `among`; None where content does not tell.

        The input with the fewest possible places decides: a mask is the same for many samples. Where the rows of any
        input are all there, but not one behind the other, they are scattered, whatever such a mask says.
        """
        best: list[Spot] = []
        for path, rows in self._samples(among, micro_batch):
            spots = self._spots(among, path, rows)
            # Rows have other numbers in a micro-batch than in the full batch: not to find them there says nothing.
            if not spots and best and micro_batch[path].readings:
                continue
            if not spots:
                spot = self._find_scattered(among, path, rows)
                if spot is not None:
                    self._taken.add(spot)
                    return spot
            elif not best or len(spots) < len(best):
                best = spots
        if not best:
            return None
        # A batch may hold the same sample several times: each micro-batch with it gets the next of its places.
        spot = next((spot for spot in best if spot not in self._taken), best[0])
        self._taken.add(spot)
        return spot

    def _samples(self, among: Sequence[int], micro_batch: ForwardInputs) -> list[tuple[str, list[FingerprintedRow]]]:
        """The inputs that have as many rows as the first that shrank; last what may count the rows of others."""
        inputs = {path: rows_of([prints], 0) for path, prints in micro_batch.items()}
        sizes = {path: (len(rows), {len(self._rows(at, path)) for at in among}) for path, rows in inputs.items()}
        shrunk = next((size for size in sizes.values() if max(size[1], default=0) > size[0]), None)
        alike = [(path, rows) for path, rows in inputs.items() if shrunk is None or sizes[path] == shrunk]
        # Other inputs are tried first: numbers within a micro-batch would be found at the wrong samples.
        return sorted(alike, key=lambda pair: bool(micro_batch[pair[0]].readings))

    def _spots(self, among: Sequence[int], path: str, rows: list[FingerprintedRow]) -> list[Spot]:
        for shift in _SHIFTS:
            spots = []
            for forward in among:
                full_rows = self._rows(forward, path)
                for start in range(len(full_rows) - len(rows) + 1):
                    if all(alike(row, full_rows[start + at], shift) for at, row in enumerate(rows)):
                        spots.append(Spot(forward, tuple(range(start, start + len(rows)))))
            if spots:
                break
        return spots

    def _find_scattered(self, among: Sequence[int], path: str, rows: list[FingerprintedRow]) -> Spot | None:
        """Each row at the first place that holds it and that no other row was given; None where one has no place."""
        for forward in among:
            full_rows = self._rows(forward, path)
            exact: dict[Any, list[int]] = {}
            for at, row in enumerate(full_rows):
                exact.setdefault(row.contents, []).append(at)
            places_taken = {place for spot in self._taken if spot.forward == forward for place in spot.places}
            places: dict[int, None] = {}
            for row in rows:
                # Only a row that was padded to another length has to be held against every other one.
                candidates = exact.get(row.contents) or next(
                    filter(None, ([at for at, each in enumerate(full_rows) if alike(row, each, n)] for n in _SHIFTS)),
                    [],
                )
                free = [at for at in candidates if at not in places]
                if not free:
                    break
                places[next((at for at in free if at not in places_taken), free[0])] = None
            else:
                return Spot(forward, tuple(places)) if places else None
        return None

    def _read(self, forward: int, path: str) -> list[FingerprintedRow]:
        prints = self._forwards[forward].get(path)
        return rows_of([prints], 0) if prints is not None else []
