"""The norms of thousands of pairs of gradients in a few operations, and the element of one that differs most.

large ones                walked in slices, so that nothing is copied
many of one shape         stacked: a row of a matrix each
few of a shape, small     laid end to end, reduced by segments
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gaverify.passes.devices import widest
from gaverify.records.comparison import Element
from gaverify.torch_internals import flatten_tensors

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
    overflowed there, once more in double precision. What is lost otherwise are bits that no decision hangs on.
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
        shapes: Of the parameters: an index counts complex elements once.
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
