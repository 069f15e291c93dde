"""Did both runs see the same samples in a window? Compares fingerprints of rows, whatever they were padded to.

Shapes: one row per sample; rows of length T, whose first t steps have the running hash `hash[t - 1]`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from gaverify.records.audit import RowCheck

# Two computations of the same row differ by rounding, rows of different samples by far more.
_COMPUTED = 1e-4
_ENTRY = re.compile(r" \(\d+\)$")


@dataclass
class Row:
    """One row of a tensor, as its fingerprints."""

    length: int
    hashes: list[int]
    tail: int
    hashes_left: list[int]
    tail_left: int
    projections: list[float] | None


@dataclass
class _Matched:
    left_full: list[Row]
    left_accumulated: list[Row]
    padded: bool = False
    rows: tuple[int, int] = field(default=(0, 0))


def check_rows(full: list[dict[str, Any]], accumulated: list[dict[str, Any]]) -> RowCheck:
    """Compares the rows of every input tensor of a window, over all its forwards and in any order.

    A tensor that is the same in every forward of both runs, although one has more forwards, holds no samples.
    """
    by_path_full, by_path = _by_path(full), _by_path(accumulated)
    worst = RowCheck(0, 0, checked=False)
    for path in by_path_full.keys() & by_path.keys():
        matched = _matched(by_path_full[path], by_path[path])
        if matched is None:
            continue
        differing = max(len(matched.left_full), len(matched.left_accumulated))
        check = RowCheck(*matched.rows, differing, path, matched.padded or worst.padded)
        if not worst.checked or check.differing > worst.differing:
            worst = check
        elif matched.padded and not worst.padded:
            worst = RowCheck(worst.full, worst.accumulated, worst.differing, worst.path, True)
    return worst


def _by_path(forwards: list[dict[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for forward in forwards:
        for path, rows in forward.items():
            found.setdefault(_ENTRY.sub("", path), []).append(rows)
    return found


def _matched(full: list[Any], accumulated: list[Any]) -> _Matched | None:
    shapes = {tuple(rows["shape"]) for rows in [*full, *accumulated]}
    contents = {tuple(rows["hash"][:, -1].tolist()) for rows in [*full, *accumulated]}
    if len(shapes) == len(contents) == 1 and len(full) != len(accumulated):
        return None  # a mask, a table of positions: the same in every forward
    dim = _batch_dimension(full, accumulated)
    left, right = rows_of(full, dim), rows_of(accumulated, dim)
    counts = len(left), len(right)
    matched = _exactly(left, right)
    for trimmed in (_by_prefix, _by_suffix):
        if matched.left_full and matched.left_accumulated:
            again = trimmed(matched.left_full, matched.left_accumulated)
            again.padded = matched.padded or len(again.left_full) < len(matched.left_full)
            matched = again
    if matched.left_full and matched.left_accumulated:
        matched = _to_rounding(matched)
    matched.rows = counts
    return matched


def _batch_dimension(full: list[Any], accumulated: list[Any]) -> int:
    """The first of the two leading dimensions that accumulation made smaller; 0 where neither changed."""
    for dim in (0, 1):
        shapes = [[rows["shape"] for rows in side] for side in (full, accumulated)]
        sizes = [{shape[dim] if len(shape) > dim else -1 for shape in side} for side in shapes]
        if sizes[0] != sizes[1]:
            return dim
    return 0


def rows_of(entries: list[Any], dim: int) -> list[Row]:
    """Returns the rows of several fingerprinted tensors along one of their two leading dimensions."""
    rows = []
    for entry in entries:
        part = entry if dim == 0 else entry["second"]
        hashes = part["hash"].tolist()
        count, length = len(hashes), len(hashes[0])
        nothing = [[0]] * count
        columns = (
            hashes,
            part["tail"].tolist() if "tail" in part else [length] * count,
            part["hash_left"].tolist() if "hash_left" in part else nothing,
            part["tail_left"].tolist() if "tail_left" in part else [length] * count,
            part["projections"].tolist() if "projections" in part else [None] * count,
        )
        rows += [Row(length, h, t, hl, tl, p) for h, t, hl, tl, p in zip(*columns, strict=True)]
    return rows


def alike(row: Row, other: Row) -> bool:
    """Whether two rows hold the same sample, whatever each was padded to."""
    if row.length == other.length:
        return row.hashes[-1] == other.hashes[-1]
    return any(_agree(row, other, side) for side in (_from_the_left, _from_the_right))


def _exactly(full: list[Row], accumulated: list[Row]) -> _Matched:
    open_rows = Counter((row.length, row.hashes[-1]) for row in accumulated)
    left = []
    for row in full:
        key = (row.length, row.hashes[-1])
        if open_rows[key] > 0:
            open_rows[key] -= 1
        else:
            left.append(row)
    rest = []
    for row in accumulated:
        key = (row.length, row.hashes[-1])
        if open_rows[key] > 0:
            open_rows[key] -= 1
            rest.append(row)
    return _Matched(left, rest)


def _by_prefix(full: list[Row], accumulated: list[Row]) -> _Matched:
    return _trimmed(full, accumulated, _from_the_left)


def _by_suffix(full: list[Row], accumulated: list[Row]) -> _Matched:
    return _trimmed(full, accumulated, _from_the_right)


def _from_the_left(row: Row) -> tuple[list[int], int]:
    return row.hashes, row.tail


def _from_the_right(row: Row) -> tuple[list[int], int]:
    return row.hashes_left, row.tail_left


def _trimmed(full: list[Row], accumulated: list[Row], side: Any) -> _Matched:
    """Pairs rows of different length whose shorter one is the beginning of the longer, and the rest is constant."""
    rest, left = list(accumulated), []
    for row in full:
        partner = next((other for other in rest if _agree(row, other, side)), None)
        if partner is None:
            left.append(row)
        else:
            rest = [other for other in rest if other is not partner]
    return _Matched(left, rest)


def _agree(row: Row, other: Row, side: Any) -> bool:
    if row.length == other.length:
        return False
    longer, shorter = (row, other) if row.length > other.length else (other, row)
    (long_hashes, long_tail), (short_hashes, _) = side(longer), side(shorter)
    common = shorter.length
    if len(long_hashes) < common or len(short_hashes) < common:
        return False  # too long to keep their running hashes
    return bool(long_tail <= common and long_hashes[common - 1] == short_hashes[common - 1])


def _to_rounding(matched: _Matched) -> _Matched:
    """Pairs rows that were computed and agree only to rounding."""
    left = [row for row in matched.left_full if row.projections is not None]
    right = [row for row in matched.left_accumulated if row.projections is not None]
    if not left or not right:
        return matched
    a = torch.tensor([row.projections for row in left], dtype=torch.float64, device="cpu")
    b = torch.tensor([row.projections for row in right], dtype=torch.float64, device="cpu")
    scale = torch.maximum(a[:, 2:].abs(), b[:, 2:].abs().T).clamp_min(1e-300)
    distance = torch.cdist(a, b, p=float("inf")) / scale
    paired_left: set[int] = set()
    paired_right: set[int] = set()
    for at in range(len(left)):
        close = [int(j) for j in (distance[at] < _COMPUTED).nonzero().flatten() if int(j) not in paired_right]
        if close:
            paired_left.add(id(left[at]))
            paired_right.add(close[0])
    gone = {id(right[j]) for j in paired_right}
    return _Matched(
        [row for row in matched.left_full if id(row) not in paired_left],
        [row for row in matched.left_accumulated if id(row) not in gone],
        matched.padded,
    )
