"""Compares two sets of gradients: a row of numbers per parameter, measured in bulk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gaverify.passes.gradients import Gradients
from gaverify.passes.precision import unit_roundoff, widest
from gaverify.passes.wrappers import RankSum, is_sharded, local, share_of
from gaverify.records.outcomes import Element, Method, NotCompared, Outcome, ParameterComparison, relative_total
from gaverify.thresholds import FEW_UNITS
from gaverify.torch_internals import flatten_tensors
from gaverify.verdict.criteria import Difference, not_compared, record

# The norms of thousands of pairs of gradients in a few operations, and the element of one that differs most.
#
#     large ones                walked in slices, so that nothing is copied
#     many of one shape         stacked: a row of a matrix each
#     few of a shape, small     laid end to end, reduced by segments


# Elements of a large parameter that are looked at together: on a CPU their difference stays in the cache.
_SLICE, _SLICE_CPU = 1 << 18, 1 << 16
_PIECE = 1 << 17  # elements of small parameters that are laid end to end
_SMALL = 1 << 15
_ALIKE = 8  # parameters of one shape from which on they are measured as the rows of a matrix
_SAFE = (1e-9, 1e15)  # norms at which float32 can sum the squares of all that matters

Norms = Sequence[float]
"""‖e‖, ‖a‖ and ‖a − e‖ of one parameter: expected (the full batch's), actual (accumulated), their difference."""
Tensors = list[torch.Tensor]


class Alike(NamedTuple):
    """Parameters of one shape, dtype and device, with both gradients of each; `shape` is the parameters' own."""

    shape: tuple[int, ...]
    names: list[str]
    expected: Tensors
    actual: Tensors

    def real(self) -> Alike:
        """Returns complex gradients as pairs of real numbers."""
        if not (self.expected[0].is_complex() or self.actual[0].is_complex()):
            return self
        expected, actual = ([torch.view_as_real(t.resolve_conj()) for t in side] for side in self[2:])
        return self._replace(expected=expected, actual=actual)


class _Piece(NamedTuple):
    """Pairs that are measured together, and how: `run(expected, actual, dtype)` gives a matrix of shape (P, 3)."""

    run: Callable[[Tensors, Tensors, torch.dtype], torch.Tensor]
    expected: Tensors
    actual: Tensors
    places: Sequence[int]

    @property
    def narrow(self) -> bool:
        """Whether float32 is tried first."""
        first = self.expected[0]
        return first.device.type == "cpu" and first.dtype is self.actual[0].dtype is torch.float32

    def measure_rows(self, wide: bool) -> torch.Tensor:
        """The norms in the device's widest precision, or in float32 where that is tried first."""
        dtype = torch.float32 if self.narrow and not wide else widest(self.expected[0].device)
        return self.run(self.expected, self.actual, dtype)


def norms_of(groups: Sequence[Alike]) -> list[Norms]:
    """Returns the norms of every pair, group by group.

    On a CPU float32 is measured in float32, which is three times as fast; where the squares may have vanished or
    overflowed there, once more in double precision. The bits that are lost otherwise decide nothing.
    """
    (low, high), pieces = _SAFE, list(_pieces(groups))
    norms: list[Norms] = [()] * sum(len(group.names) for group in groups)
    for piece, rows in zip(pieces, _fetch_tables([piece.measure_rows(wide=False) for piece in pieces]), strict=True):
        # Squares below 1e-38 vanish in float32 and those above 3e38 overflow: such a norm is no number to decide by.
        if piece.narrow and not all(low < e < high and low < a < high and d < high for e, a, d in rows):
            rows = piece.measure_rows(wide=True).tolist()
        for place, row in zip(piece.places, rows, strict=True):
            norms[place] = row
    return norms


def _fetch_tables(tables: list[torch.Tensor]) -> list[list[Norms]]:
    """The rows of all tables, after one transfer per device."""
    devices: dict[torch.device, list[int]] = {}
    for at, table in enumerate(tables):
        devices.setdefault(table.device, []).append(at)
    rows: list[list[Norms]] = [[] for _ in tables]
    for numbers in devices.values():
        everything = iter(
            torch.cat(
                [tables[at].double() if tables[at].device.type == "cpu" else tables[at] for at in numbers]
            ).tolist()
        )
        for at in numbers:
            rows[at] = [next(everything) for _ in range(len(tables[at]))]
    return rows


def _pieces(groups: Sequence[Alike]) -> Iterator[_Piece]:
    place = 0
    odd: dict[tuple[Any, ...], tuple[Tensors, Tensors, list[int]]] = {}
    for group in groups:
        first, count = group.expected[0], len(group.names)
        # Few of a shape: a stack of two is no cheaper than two launches, so all shapes are laid end to end.
        if first.numel() < _SMALL and count < _ALIKE:
            expected, actual, places = odd.setdefault((first.dtype, group.actual[0].dtype, first.device), ([], [], []))
            expected += group.expected
            actual += group.actual
            places += range(place, place + count)
        else:
            size = 1 if first.numel() >= _SMALL else max(1, _PIECE // max(first.numel(), 1))
            for at in range(0, count, size):
                end = min(at + size, count)
                run = _norms_by_slices if first.numel() >= _SMALL else _norms_of_stack
                yield _Piece(run, group.expected[at:end], group.actual[at:end], range(place + at, place + end))
        place += count
    for expected, actual, places in odd.values():
        start = room = 0
        for at, tensor in enumerate(expected):
            room += tensor.numel()
            if room >= _PIECE or at == len(expected) - 1:
                end = at + 1
                yield _Piece(_segments, expected[start:end], actual[start:end], places[start:end])
                start, room = end, 0


def _norms_of_stack(expected: Tensors, actual: Tensors, wide: torch.dtype) -> torch.Tensor:
    """The norms of many small parameters of one shape: a row for each."""
    size = len(expected), expected[0].numel()
    e, a = (torch.stack(side).to(wide).view(size) for side in (expected, actual))
    norms = [torch.linalg.vector_norm(side, dim=1) for side in (e, a)]
    return torch.stack([*norms, torch.linalg.vector_norm(a.sub_(e), dim=1)], dim=1)


def _segments(expected: Tensors, actual: Tensors, wide: torch.dtype) -> torch.Tensor:
    """The norms of small parameters of any shapes: laid end to end, reduced by segments."""
    e, a = (flatten_tensors(side).to(wide) for side in (expected, actual))
    # Not made on the device: filling it there from a list would wait for everything before it.
    lengths = torch.tensor([tensor.numel() for tensor in expected], device="cpu").to(e.device, non_blocking=True)
    squares = torch.stack([e * e, a * a, (a - e).square_()], dim=1)
    return torch.segment_reduce(squares, "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0).sqrt_()


def _norms_by_slices(expected: Tensors, actual: Tensors, wide: torch.dtype) -> torch.Tensor:
    """The norms of one large parameter, slice by slice."""
    parts: Tensors = []
    half = expected[0].dtype in (torch.bfloat16, torch.float16)
    kind = torch.float32 if half else torch.promote_types(expected[0].dtype, actual[0].dtype)
    size = _SLICE_CPU if expected[0].device.type == "cpu" else _SLICE
    buffer = torch.empty(size, dtype=kind, device=expected[0].device)
    for e, a in zip(*(side[0].reshape(-1).split(size) for side in (expected, actual)), strict=True):
        # The difference of two bfloat16 numbers is no bfloat16 number: it would be rounded as much as what it measures.
        if half:
            e, a = e.float(), a.float()
        difference = torch.sub(a, e, out=buffer[: len(e)])
        parts += [_norm(side, wide) for side in (e, a, difference)]
    table = torch.stack(parts).to(widest(expected[0].device)).view(-1, 3)
    norms: torch.Tensor = torch.linalg.vector_norm(table, dim=0)
    return norms.unsqueeze(0)


def _norm(values: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """The norm of a slice; on a CPU by the product with itself, which runs at the speed of memory."""
    if values.device.type == "cpu" and values.dtype is wide:
        # `vector_norm` scales against overflow, which costs three times the product and is not needed within `_SAFE`.
        return torch.dot(values, values).sqrt_()
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm


def worst_elements(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], shapes: Sequence[tuple[int, ...]]
) -> list[Element]:
    """Returns the worst element of every pair (expected, actual), after one transfer per device for all of them.

    Args:
        pairs: Gradients as real numbers, not empty; complex ones as pairs of real numbers in a last dimension.
        shapes: The parameters' shapes: an index counts complex elements once.
    """
    devices: dict[torch.device, list[int]] = {}
    for at, (expected, _) in enumerate(pairs):
        devices.setdefault(expected.device, []).append(at)
    elements: dict[int, Element] = {}
    for numbers in devices.values():
        table = torch.stack([_worst(*pairs[at]) for at in numbers]).tolist()
        for at, (index, expected, actual) in zip(numbers, table, strict=True):
            # A complex gradient was viewed as pairs of real numbers in a last dimension of its own.
            parts = 2 if pairs[at][0].dim() > len(shapes[at]) else 1
            elements[at] = Element(_unravel_index(int(index) // parts, shapes[at]), expected, actual)
    return [elements[at] for at in range(len(pairs))]


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


def _unravel_index(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    result = []
    for size in reversed(shape):
        result.append(index % size)
        index //= size
    return tuple(reversed(result))


# Compares two sets of gradients: a row of numbers per parameter, measured in bulk.


def measure(
    accumulated: Gradients, reference: Gradients, ranks: RankSum | None = None, *, find_worst: bool | None = None
) -> list[Difference]:
    """Returns the norms of both gradients and of their difference for every parameter, in the order of `reference`.

    Args:
        accumulated: The gradients under test (`actual`), by parameter name.
        reference: The full-batch gradients (`expected`), under the same names.
        ranks: Measures what all of them hold together, in one collective for all parameters; each rank has to call
            this. None: what this process holds.
        find_worst: Look for the worst element wherever there is a difference, or nowhere; None: where it may be no
            rounding.

    A gradient of None is not a zero: a parameter that has one on one side only gets a NaN difference and a reason.
    Sparse gradients are coalesced; complex ones are measured by modulus.
    """
    if ranks is not None:
        return _measure_all_ranks(accumulated, reference, ranks)
    return _measure_pairs(accumulated, reference, find_worst)


def left_between(gradients: Gradients, reference: Gradients, ranks: RankSum | None = None) -> float:
    """Returns ‖gradients − reference‖ / ‖reference‖ of the whole gradient; 0 where there is none."""
    return relative_total((row.difference, row.reference) for row in measure(gradients, reference, ranks))


def _measure_pairs(accumulated: Gradients, reference: Gradients, find_worst: bool | None) -> list[Difference]:
    rows: dict[str, Difference] = {}
    alike: dict[tuple[Any, ...], Alike] = {}
    for name, expected in reference.items():
        actual = accumulated[name]
        if expected is None or actual is None:
            rows[name] = _one_sided(name, actual, expected)
            continue
        if expected.layout is not torch.strided or actual.layout is not torch.strided:
            expected, actual = expected.to_dense(), actual.to_dense()
        # One reduction per shape in place of one per parameter: a launch per parameter costs more than the numbers.
        key = expected.shape, expected.dtype, actual.dtype, expected.get_device()
        group = alike.get(key)
        if group is None:
            group = alike[key] = Alike(tuple(expected.shape), [], [], [])
        group.names.append(name)
        group.expected.append(expected)
        group.actual.append(actual)
    groups = [group.real() for group in alike.values()]
    numbers = iter(norms_of(groups))
    unsure: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for group in groups:
        shape, units = group.shape, 0.0 if find_worst else FEW_UNITS * unit_roundoff(group.expected[0].dtype)
        for at, name in enumerate(group.names):
            e, a, d = next(numbers)
            # Written so that NaN, which compares false with everything, is caught as well.
            if not d < math.inf:
                rows[name] = _not_finite(name, shape, e, a)
                continue
            # as `Difference(…)`, without its function in Python
            rows[name] = tuple.__new__(Difference, (name, shape, e, a, d, None, None))
            # The worst element takes another pass over the gradients: only where the difference may be no rounding.
            if find_worst is not False and d > units * (e if e > a else a):
                unsure[name] = group.expected[at], group.actual[at]
    places = worst_elements(list(unsure.values()), [rows[name].shape for name in unsure])
    for name, element in zip(unsure, places, strict=True):
        rows[name] = rows[name]._replace(worst=element)
    return [rows[name] for name in reference]


def _measure_all_ranks(accumulated: Gradients, reference: Gradients, ranks: RankSum) -> list[Difference]:
    """Measures what this rank holds and adds up all ranks' squares: every rank gets the same numbers."""
    shards = [{name: None if g is None else local(g) for name, g in side.items()} for side in (accumulated, reference)]
    rows = _measure_pairs(shards[0], shards[1], None)
    table = []
    for row in rows:
        sides = (reference[row.name], accumulated[row.name])
        first_present = next((side for side in sides if side is not None), None)
        # A replica that all ranks hold counts once in all, a shard counts in full on its rank.
        share = share_of(first_present, ranks.count) if first_present is not None else 0.0
        norms = (row.reference, row.accumulated, row.difference)
        # NaN would make the sums of all ranks NaN, and their rows could not be told apart any more.
        squares = [share * norm * norm if row.why is None or norm == norm else 0.0 for norm in norms]
        odd = row.why not in (None, NotCompared.UNUSED) and None not in sides
        table.append([*squares, *(float(side is not None) for side in sides), float(odd)])
    sums = ranks.add_up(torch.tensor(table, dtype=torch.float64, device="cpu").view(-1, 6)).tolist()
    differences = []
    for row, (e, a, d, with_e, with_a, odd) in zip(rows, sums, strict=True):
        sides = (reference[row.name], accumulated[row.name])
        first_present = next((side for side in sides if side is not None), None)
        shape = tuple(first_present.shape) if first_present is not None else row.shape
        # A gradient that some ranks lack is missing, whatever the others have: their optimizers step differently.
        if min(with_e, with_a) < ranks.count:
            differences.append(_missing(row.name, shape, with_e, with_a))
        elif odd or not math.isfinite(d):
            differences.append(_not_finite(row.name, shape, math.sqrt(e), math.sqrt(a)))
        else:
            # The worst element of a shard is not that of the parameter, which no rank sees as a whole.
            worst = None if is_sharded(first_present) else row.worst
            differences.append(Difference(row.name, shape, math.sqrt(e), math.sqrt(a), math.sqrt(d), worst, None))
    return differences


def _missing(name: str, shape: tuple[int, ...], reference: float, accumulated: float) -> Difference:
    """The row of a parameter without a gradient on some ranks, or on all; given how many have one on each side."""
    why = NotCompared.MISSING_IN_ACCUMULATED if accumulated < reference else NotCompared.MISSING_IN_FULL
    why = why if reference or accumulated else NotCompared.UNUSED
    return Difference(name, shape, math.nan, math.nan, math.nan, None, why)


def _one_sided(name: str, actual: torch.Tensor | None, expected: torch.Tensor | None) -> Difference:
    present = expected if expected is not None else actual
    if present is None:
        return Difference(name, (), math.nan, math.nan, math.nan, None, NotCompared.UNUSED)
    why = NotCompared.MISSING_IN_ACCUMULATED if actual is None else NotCompared.MISSING_IN_FULL
    return Difference(name, tuple(present.shape), math.nan, math.nan, math.nan, None, why)


def _not_finite(name: str, shape: tuple[int, ...], reference: float, accumulated: float) -> Difference:
    if not math.isfinite(reference) and not math.isfinite(accumulated):
        why = NotCompared.NOT_FINITE_IN_BOTH
    else:
        only = math.isfinite(reference)
        why = NotCompared.NOT_FINITE_IN_ACCUMULATED if only else NotCompared.NOT_FINITE_IN_FULL
    return Difference(name, shape, reference, accumulated, math.nan, None, why)


def by_tolerance(
    measured: list[Difference], accumulated: Gradients, reference: Gradients, rtol: float, atol: float
) -> list[ParameterComparison]:
    """Decides by |actual − expected| ≤ atol + rtol · |expected| for every element, as `assert_close` does."""
    rows = []
    for row in measured:
        actual, expected = accumulated[row.name], reference[row.name]
        allowed, outcome = math.nan, Outcome.INCONCLUSIVE
        if actual is not None and expected is not None:
            actual, expected = (t.to_dense() if t.layout is not torch.strided else t for t in (actual, expected))
            close = bool(torch.isclose(actual, expected, rtol=rtol, atol=atol).all())
            outcome = Outcome.EQUIVALENT if close else Outcome.DIVERGENT
            # The norm of all elements' limits: what a report prints beside the norm of the difference.
            limit = atol + rtol * expected.abs().double()
            allowed = float(torch.linalg.vector_norm(limit))
        missing = row.why is not None
        rows.append(not_compared(row) if missing else record(row, outcome, Method.TOLERANCE, allowed, row.difference))
    return rows
