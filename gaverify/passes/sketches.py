"""Sketches: 4,096 numbers that stand for all gradients, add as they do, and keep their inner products; weights by fit.

Linear relations of gradients hold of their sketches exactly; lengths and angles are kept to 1/sqrt(4096), 2 %, in the
mean. So what holds of all micro-batches' gradients is read from kilobytes, and there is never a second set of them.

Shapes: K micro-batches; S numbers stand for each gradient (a sketch of it, or a sample of its elements).

    g_full ≈ Σ c_k g_k        the right weights c
    g_used ≈ Σ w_k g_k        the weights w that reached the optimizer

Source: W. Johnson, J. Lindenstrauss, Extensions of Lipschitz mappings into a Hilbert space, 1984.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import cache, lru_cache

import torch

from gaverify.passes.precision import widest
from gaverify.passes.wrappers import RankSum, local, shard_number, share_of
from gaverify.records.experiment import WeightFit

SKETCH = 4096
_CHUNK_ROWS, _TILE = 256, 16
_APART = 2531  # 4096 times the golden section: the starts of successive tensors divide the buckets most evenly
_SMALL = _TILE * SKETCH
"""Elements below which a tensor is of one tile, and added to a sketch together with others."""
_FEWEST_ROWS, _MOST_ROWS = _TILE + 2, 8 * _TILE
"""Rows of 4096 that wait to be added up: of one tensor at any start, and of many; 2 MB in float32."""


def sketch(tensors: Iterable[torch.Tensor | None], ranks: RankSum | None = None) -> torch.Tensor:
    """Returns a linear sketch of length 4096 of all tensors, in float64, where they are; on the CPU of several devices.

    Each element is added with a random sign to a bucket, that of its position modulo 4096 from where its tensor starts,
    so inner products are preserved in expectation and linear relations exactly. Start and signs depend on a tensor's
    place in the list, whether or not those before it are None: a parameter that one micro-batch leaves out changes
    nothing for the others. Starts lie far apart, so that the elements of a small model each have a bucket of their own.

    Args:
        tensors: Gradients, in the same order each time; None for a parameter without one.
        ranks: Sketches what all of them hold together; each rank has to call this. None: what this process holds.

    Source: M. Charikar, K. Chen, M. Farach-Colton, Finding frequent items in data streams, 2002 (count sketch).
    """
    if ranks is not None:
        return _sketch_all_ranks(list(tensors), ranks)
    total = SketchSum()
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            total.add(tensor, place)
    return total.take()


def _sketch_all_ranks(tensors: list[torch.Tensor | None], ranks: RankSum) -> torch.Tensor:
    """The sketch of what all ranks hold, on each one's host: shards have signs of their own, replicas are averaged."""
    summed = torch.zeros(SKETCH, dtype=torch.float64, device="cpu")
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            shard_sketch = sketch_of(local(tensor), place + len(tensors) * shard_number(tensor))
            summed += shard_sketch.to("cpu", torch.float64) * share_of(tensor, ranks.count)
    return ranks.add_up(summed)


def sketch_of(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Returns the sketch of one tensor of the list, shape (4096,), where it is: those of all of them add up."""
    total = SketchSum()
    total.add(tensor, place)
    return total.take()


class SketchSum:
    """The sketch of tensors that are given one by one.

    A launch takes as long as the work on a small tensor. Small ones are therefore only copied when they are given, with
    their signs, to where each element stands below its bucket; those rows are added up all at once.
    """

    def __init__(self) -> None:
        self._totals: dict[torch.device, torch.Tensor] = {}
        self._waiting: dict[tuple[torch.device, torch.dtype], _Rows] = {}

    @torch.no_grad()
    def add(self, tensor: torch.Tensor, place: int) -> None:
        """Adds the tensor at a place of the list; its memory may go after that."""
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        flat = real.reshape(-1) if real.ndim != 1 else real
        start = place * _APART % SKETCH
        if flat.numel() >= _SMALL:
            self._add_total(_buckets(flat, place).roll(start))
        elif flat.numel():
            key = flat.device, torch.float32 if flat.dtype.itemsize <= 4 else flat.dtype
            rows = self._waiting.get(key)
            if rows is None or not rows.has_room(start, flat.numel()):
                # a few tensors do not pay for the memory of many
                self._add_up(key)
                rows = self._waiting[key] = _Rows(*key, _FEWEST_ROWS if rows is None else _MOST_ROWS)
            rows.place(flat, start, _signs_of_a_small(place, flat.numel(), flat.device))

    def take(self) -> torch.Tensor:
        """Returns the sketch, and begins another."""
        for key in self._waiting:
            self._add_up(key)
        totals, self._totals = list(self._totals.values()), {}
        if len(totals) == 1:
            return totals[0]
        on_host = torch.zeros(SKETCH, dtype=torch.float64, device="cpu")
        return sum((total.to("cpu", torch.float64) for total in totals), start=on_host)

    def _add_up(self, key: tuple[torch.device, torch.dtype]) -> None:
        if (rows := self._waiting.get(key)) is not None and rows.end:
            self._add_total(rows.take())

    def _add_total(self, total: torch.Tensor) -> None:
        before = self._totals.get(total.device)
        self._totals[total.device] = total if before is None else before.add_(total)


class _Rows:
    """Small tensors with their signs, one behind another, each from where its first bucket is in some row of 4096."""

    def __init__(self, device: torch.device, dtype: torch.dtype, count: int) -> None:
        self._numbers = torch.zeros(count * SKETCH, dtype=dtype, device=device)
        self.end = 0

    def has_room(self, start: int, count: int) -> bool:
        """Whether so many numbers fit behind the others, the first of them in the bucket `start`."""
        return self._next(start) + count <= len(self._numbers)

    def place(self, flat: torch.Tensor, start: int, signs: torch.Tensor) -> None:
        """Copies numbers with their signs; one launch."""
        begin = self._next(start)
        self.end = begin + len(flat)
        torch.mul(flat, signs, out=self._numbers[begin : self.end])

    def take(self) -> torch.Tensor:
        """Returns the sum of each bucket, shape (4096,), and empties the rows."""
        used = self._numbers[: -(-self.end // SKETCH) * SKETCH].view(-1, SKETCH)
        total = used.sum(0, dtype=widest(used.device))
        used.zero_()
        self.end = 0
        return total

    def _next(self, start: int) -> int:
        return self.end + (start - self.end) % SKETCH


def _buckets(flat: torch.Tensor, place: int) -> torch.Tensor:
    """The buckets of a large tensor; signs hang on its place."""
    return sum_by_bucket(flat, str(place), SKETCH)


def sum_by_bucket(flat: torch.Tensor, name: str, width: int, start: int = 0) -> torch.Tensor:
    """Returns the sums of a tensor's elements, with their signs, by their position modulo `width`; where it is.

    A sign is the product of one that all tiles of 16 rows share and one of its tile: it costs less to make than to
    use. Any two are independent, so that E‖Sx‖² = ‖x‖². Signs hang on the name and the position alone, not on the
    device or the process: the sketches of a tensor's pieces add up to that of the tensor.

    Args:
        flat: Some elements, which follow each other in the whole tensor.
        name: The tensor's name.
        width: Number of buckets.
        start: Position of the first element in the whole tensor.
    """
    wide, tile = widest(flat.device), _TILE * width
    # A product with a sign is exact in float32, and a sum of 16 of half a precision's to that's own roundoff.
    shared = _shared_signs(flat.device, torch.float32 if flat.dtype.itemsize <= 4 else wide, width)
    summed = torch.float32 if flat.dtype.itemsize == 2 else wide
    # a processor's cache holds no more; elsewhere each piece costs many launches
    length = width * (_CHUNK_ROWS if flat.is_cpu else 4 * _CHUNK_ROWS)
    total = None
    # Signs are made eight at a time: the first piece begins with as many zeros as lead back to a tile that has them.
    position = start - start % (8 * tile)
    while position < start + flat.numel():
        part = flat[max(position - start, 0) : position - start + length].to(shared.dtype)
        before = max(start - position, 0)
        if before or part.numel() % tile:
            part = torch.nn.functional.pad(part, (before, -(before + part.numel()) % tile))
        tiles = (part.view(-1, _TILE, width) * shared).sum(1, dtype=summed)
        signs = _signs(tiles.numel(), name, flat.device, position // _TILE).view_as(tiles)
        columns = (tiles * signs).sum(0, dtype=wide)
        total = columns if total is None else total.add_(columns)
        position += length
    return flat.new_zeros(width, dtype=wide) if total is None else total


def _signs_of_a_small(place: int, count: int, device: torch.device) -> torch.Tensor:
    """The signs of a tensor of less than one tile, shape (count,)."""
    return (_signs_of_a_row if count <= SKETCH else _signs_of_rows)(place, count, device)


def _make_small(place: int, count: int, device: torch.device) -> torch.Tensor:
    row = _signs(SKETCH, str(place), device)
    rows = _shared_signs(device, torch.int8, SKETCH)[: -(-count // SKETCH)]
    return (rows * row).view(-1)[:count].clone()


# Most of a model's tensors are of one row, and making signs costs most there: 8 MB of those and 16 MB of others.
_signs_of_a_row, _signs_of_rows = lru_cache(maxsize=2048)(_make_small), lru_cache(maxsize=256)(_make_small)


@cache
def _shared_signs(device: torch.device, dtype: torch.dtype, width: int) -> torch.Tensor:
    """The signs of a tile, shape (16, width), made once for each device."""
    return _signs(_TILE * width, "tile", device).view(_TILE, width).to(dtype)


def _signs(count: int, name: str, device: torch.device, first: int = 0) -> torch.Tensor:
    """Returns -1 or 1 for the numbers from `first`, a multiple of 8, on: the same ones on every device.

    Each is the lowest bit of a byte of a random word, as a word costs more than its use.

    Source: G. Steele, D. Lea, C. Flood, Fast splittable pseudorandom number generators, 2014 (SplitMix64).
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
    words = torch.arange(first // 8, first // 8 - (-count // 8), device=device)
    words.mul_(_INCREMENT).add_(seed)  # a product that overflows keeps its lower 64 bits
    for shift, factor in _MIX:
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)
    return words.view(torch.int8)[:count].bitwise_and_(1).mul_(2).sub_(1)


_INCREMENT = -0x61C8864680B583EB
_MIX = (30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)


SINGULAR_FLOAT64, SINGULAR_FLOAT32 = 1e-10, 1e-6
"""Share of the largest singular value below which a combination of micro-batch gradients is noise of the arithmetic."""


def fit_weights(
    columns: torch.Tensor,
    target: torch.Tensor,
    *,
    singular: float,
    weights: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
    equations: int | None = None,
) -> WeightFit:
    """Returns the weights c in min ‖target − columns · c‖, and how what was used stands to the target.

    Where the micro-batches leave c open, the solution nearest to the weights that were used is returned.

    Args:
        columns: g_k, shape (S, K).
        target: g_full, shape (S,), not zero.
        singular: Share of the largest singular value from which on a combination counts.
        weights: w where they are known, shape (K,); else they are fitted to `used`.
        used: g_used, shape (S,); None: columns · weights.
        equations: How many numbers the gradients really have, where that is less than S says.
    """
    if not bool(columns.isfinite().all()) or not bool(target.isfinite().all()):  # no weights explain NaN
        used_weights = tuple(weights.tolist()) if weights is not None else (math.nan,) * columns.shape[1]
        return WeightFit(used_weights, math.inf, determined=False, used=used_weights, used_residual=math.inf)
    norm = torch.linalg.vector_norm(target).clamp_min(1e-300)
    used_residual = 0.0
    if used is None:
        assert weights is not None
        used = columns @ weights
    if weights is None:
        weights, used_residual, _, _ = _nearest(columns, used, None, singular)
    best, residual, determined, rank = _nearest(columns, target, weights, singular)
    factor = float(used @ target) / float(norm) ** 2
    residual_left = float(torch.linalg.vector_norm(used - factor * target) / norm)
    return WeightFit(
        weights=tuple(best.tolist()),
        residual=residual,
        determined=determined,
        noise=gradient_noise(columns * best / norm),
        vacuous=(len(target) if equations is None else equations) <= rank,
        used=tuple(weights.tolist()),
        used_residual=used_residual,
        factor=factor,
        factor_residual=residual_left / max(abs(factor), 1e-300),
    )


def _nearest(
    columns: torch.Tensor, target: torch.Tensor, near: torch.Tensor | None, singular: float
) -> tuple[torch.Tensor, float, bool, int]:
    """Least squares nearest to `near`, or to equal weights; with the residual, whether it is unique, and the rank."""
    count = columns.shape[1]
    norm = torch.linalg.vector_norm(target)
    if count == 0 or not bool(columns.any()) or not bool(norm):
        nothing = near if near is not None else columns.new_zeros(count)
        return nothing, 1.0 if bool(norm) else 0.0, False, 0
    u, s, vh = torch.linalg.svd(columns, full_matrices=False)
    is_kept = s > s.max() * singular
    if near is None:
        total = columns.sum(1)
        near = columns.new_full((count,), float(total @ target) / max(float(total @ total), 1e-300))
    remainder = target - columns @ near
    best = near + vh[is_kept].T @ ((u[:, is_kept].T @ remainder) / s[is_kept])
    residual = torch.linalg.vector_norm(target - columns @ best) / norm
    return best, float(residual), bool(is_kept.all()), int(is_kept.sum())


def gradient_noise(shares: torch.Tensor) -> float:
    """The standard error of Σ shares_k by the spread of its K terms, shape (S, K)."""
    count = shares.shape[1]
    if count == 0:
        return float("nan")
    spread = torch.linalg.vector_norm(shares - shares.mean(1, keepdim=True)).square()
    return float((spread * count / max(count - 1, 1)).sqrt())
