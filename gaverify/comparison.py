"""Compares two sets of gradients: a row of numbers per parameter, measured in bulk.

Shapes: P parameters of any shapes; small ones are laid end to end so that thousands of them cost a few operations,
large ones are walked in slices so that no copy of all gradients is made. Numbers cross to the host once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gaverify.results import Element, Method, Outcome, ParameterComparison

# Elements that are held as temporaries at any time: a few MiB, whatever the model's size.
_CHUNK = 1 << 18
_PIECE = 1 << 18  # elements of small parameters that are laid end to end, in float64 with their squares
_SMALL = 1 << 15
_ALIKE = 8  # parameters of one shape from which on they are measured as the rows of a matrix
_SAFE = (1e-12, 1e15)  # norms whose squares float32 can sum
# A summed gradient's rounding grows with the terms, not with the sum; "a few" units of roundoff of their scale.
WORKING_UNITS = 16.0


class Difference(NamedTuple):
    """The numbers of one parameter. NaN in `difference` where a side is missing or not finite."""

    name: str
    shape: tuple[int, ...]
    reference: float
    accumulated: float
    difference: float
    worst: Element | None
    reason: str

    @property
    def scale(self) -> float:
        """The larger of the two norms."""
        return max(self.reference, self.accumulated)


def measure(
    accumulated: Mapping[str, torch.Tensor | None], reference: Mapping[str, torch.Tensor | None]
) -> list[Difference]:
    """Returns the norms of both gradients and of their difference for every parameter, in the order of `reference`.

    Args:
        accumulated: The gradients under test (`actual`), by parameter name.
        reference: The full-batch gradients (`expected`), under the same names.

    A gradient of None is not a zero: a parameter that has one on one side only gets a NaN difference and a reason.
    Sparse gradients are coalesced; complex ones are measured by modulus.
    """
    rows: dict[str, Difference] = {}
    flat: list[Pair] = []
    for name, expected in reference.items():
        actual = accumulated[name]
        if expected is None or actual is None:
            rows[name] = _one_sided(name, actual, expected)
            continue
        shape = expected.shape
        if actual.layout is not torch.strided or expected.layout is not torch.strided:
            actual, expected = _dense(actual, expected)
        if expected.is_complex() or actual.is_complex():  # measured as pairs of real numbers
            actual, expected = (torch.view_as_real(side.resolve_conj()) for side in (actual, expected))
        flat.append(Pair(name, actual, expected, shape, expected.numel()))
    for pair, numbers in _measured(flat):
        rows[pair.name] = _row(pair, numbers)
    return [rows[name] for name in reference]


def compare(
    accumulated: Mapping[str, torch.Tensor | None],
    reference: Mapping[str, torch.Tensor | None],
    *,
    unit: float,
    scales: Mapping[str, float] | None = None,
) -> list[ParameterComparison]:
    """Returns one comparison per parameter: equivalent where ‖Δ‖₂ ≤ 16 u · scale, else inconclusive.

    Args:
        accumulated: The gradients under test, by parameter name.
        reference: The full-batch gradients.
        unit: Unit roundoff u of the arithmetic.
        scales: Σ|terms| of gradients that are sums, where it is known; the scale is never below the gradients' norms.
    """
    known = scales or {}
    rows = []
    for row in measure(accumulated, reference):
        allowed = WORKING_UNITS * unit * max(row.reference, row.accumulated, known.get(row.name, 0.0))
        outcome = Outcome.EQUIVALENT if row.difference <= allowed else Outcome.INCONCLUSIVE
        rows.append(judged(row, outcome, "working-precision", allowed))
    return rows


def judged(
    row: Difference, outcome: Outcome, method: Method, allowed: float, working: float | None = None
) -> ParameterComparison:
    """Returns the record of a measured difference and what was decided about it."""
    if row.reason and math.isnan(row.difference):
        if row.reason.startswith("unused"):
            outcome = Outcome.EQUIVALENT
        elif row.reason.endswith("in both runs"):  # NaN on both sides is neither the same nor a difference
            outcome = Outcome.INCONCLUSIVE
        elif method != "not-compared":
            outcome = Outcome.DIVERGENT
        method = "not-compared"
    return ParameterComparison(
        row.name, row.shape, outcome, method, row.reference, row.accumulated, row.difference, allowed,
        row.difference if working is None else working, row.worst, row.reason,
    )  # fmt: skip


def _one_sided(name: str, actual: torch.Tensor | None, expected: torch.Tensor | None) -> Difference:
    present = expected if expected is not None else actual
    if present is None:
        return Difference(name, (), math.nan, math.nan, math.nan, None, "unused: no gradient on either side")
    missing = "accumulated" if actual is None else "full-batch"
    return Difference(
        name, tuple(present.shape), math.nan, math.nan, math.nan, None, f"no gradient (None) in the {missing} run only"
    )


def _dense(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse gradients as the rows that either side touches would do; a mixture has to be dense on both sides."""
    return actual.to_dense(), expected.to_dense()


class Pair(NamedTuple):
    """Both gradients of one parameter as real numbers, the parameter's own shape, and how many numbers there are."""

    name: str
    actual: torch.Tensor
    expected: torch.Tensor
    shape: torch.Size
    elements: int


def _measured(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, tuple[float, ...]]]:
    """Yields (‖e‖, ‖a‖, ‖a − e‖, flat index of the worst element, its e, its a) for every pair."""
    groups: dict[tuple[Any, ...], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.expected.device, pair.expected.dtype, pair.actual.dtype), []).append(pair)
    # One transfer per device for everything that was measured there.
    pending: dict[torch.device, list[tuple[list[Pair], torch.Tensor]]] = {}
    for (device, *_), group in groups.items():
        entries = pending.setdefault(device, [])
        alike: dict[torch.Size, list[Pair]] = {}
        for pair in group:
            if pair.elements >= _SMALL:
                entries.append(([pair], _walked(pair.actual, pair.expected)))
            else:
                alike.setdefault(pair.expected.shape, []).append(pair)
        odd = [pair for pairs_alike in alike.values() if len(pairs_alike) < _ALIKE for pair in pairs_alike]
        entries += [(piece, _segments(piece)) for piece in _pieces(odd)]
        for pairs_alike in alike.values():
            if len(pairs_alike) >= _ALIKE:
                entries += [(piece, _stacked(piece)) for piece in _pieces(pairs_alike)]
    for entries in pending.values():
        rows = torch.cat([numbers for _, numbers in entries]).tolist()
        yield from zip((pair for measured, _ in entries for pair in measured), rows, strict=True)


def _pieces(pairs: list[Pair]) -> list[list[Pair]]:
    """Groups small parameters into pieces of at most `_PIECE` elements."""
    pieces: list[list[Pair]] = []
    room = 0
    for pair in pairs:
        if pair.elements > room or not pieces:
            pieces.append([])
            room = _PIECE
        pieces[-1].append(pair)
        room -= pair.elements
    return pieces


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors laid end to end, by torch's own loop: five thousand calls from Python would cost more than the rest."""
    return torch._C._nn.flatten_dense_tensors(tensors)  # type: ignore[no-any-return, attr-defined]


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _stacked(piece: list[Pair]) -> torch.Tensor:
    """The numbers of many small parameters of one shape: a row for each. Shape (P, 6)."""
    wide = _wide(piece[0].expected.device)
    size = len(piece), piece[0].elements
    expected = torch.stack([pair.expected for pair in piece]).to(wide).view(size)
    actual = torch.stack([pair.actual for pair in piece]).to(wide).view(size)
    difference = actual - expected
    norms = [torch.linalg.vector_norm(side, dim=1) for side in (expected, actual, difference)]
    if piece[0].elements == 0:
        return torch.zeros(len(piece), 6, dtype=wide, device=expected.device)
    index = difference.abs_().argmax(1, keepdim=True)
    at = [side.gather(1, index).squeeze(1) for side in (expected, actual)]
    return torch.stack([*norms, index.squeeze(1).to(wide), *at], dim=1)


def _segments(piece: list[Pair]) -> torch.Tensor:
    """The numbers of many small parameters at once: laid end to end, reduced by segments. Shape (P, 6)."""
    expected, actual = _flat([pair.expected for pair in piece]), _flat([pair.actual for pair in piece])
    wide = _wide(expected.device)
    expected, actual = expected.to(wide), actual.to(wide)
    lengths = torch.tensor([pair.elements for pair in piece]).to(expected.device, non_blocking=True)
    difference = actual - expected
    squares = torch.stack([expected * expected, actual * actual, difference * difference], dim=1)
    norms = torch.segment_reduce(squares, "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0).sqrt_()
    magnitude = difference.abs_()
    largest = torch.segment_reduce(magnitude, "max", lengths=lengths, unsafe=True, initial=0.0)
    starts = lengths.cumsum(0) - lengths
    index = _first_match(magnitude, largest, lengths, starts)
    at = (starts + index).clamp_(max=max(expected.numel() - 1, 0))
    if expected.numel() == 0:
        return torch.zeros(len(piece), 6, dtype=wide, device=expected.device)
    return torch.stack([norms[:, 0], norms[:, 1], norms[:, 2], index.to(wide), expected[at], actual[at]], dim=1)


def _first_match(
    magnitude: torch.Tensor, largest: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """The index within each segment of an element as large as the segment's largest."""
    segment = torch.repeat_interleave(
        torch.arange(len(lengths), device=lengths.device), lengths, output_size=magnitude.numel()
    )
    position = torch.arange(magnitude.numel(), device=lengths.device)
    # A segment's own maximum is found by equality; everything else is sent past the end.
    hit = torch.where(magnitude == largest[segment], position, magnitude.numel())
    first = torch.full_like(lengths, magnitude.numel()).scatter_reduce_(0, segment, hit, "amin")
    return torch.where(first == magnitude.numel(), starts, first) - starts


def _norm(part: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """‖part‖₂ in double precision.

    On a CPU torch's conversion inside the norm takes three times as long as the norm itself; where the squares neither
    vanish nor overflow in float32, 2 × 10⁵ of them lose a few bits of 24, which no decision hangs on.
    """
    if part.device.type == "cpu" and part.dtype is torch.float32:
        norm: torch.Tensor = torch.linalg.vector_norm(part)
        if _SAFE[0] < float(norm) < _SAFE[1]:
            return norm.to(wide)
    exact: torch.Tensor = torch.linalg.vector_norm(part, dtype=wide)
    return exact


def _walked(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The numbers of one large parameter, slice by slice. Shape (1, 6)."""
    e, a = expected.reshape(-1), actual.reshape(-1)
    wide = _wide(e.device)
    parts = []
    for start in range(0, e.numel(), _CHUNK):
        part_e, part_a = e[start : start + _CHUNK], a[start : start + _CHUNK]
        if part_e.dtype in (torch.bfloat16, torch.float16):
            part_e, part_a = part_e.float(), part_a.float()
        difference = part_a - part_e
        norms = [_norm(part, wide) for part in (part_e, part_a, difference)]
        largest, index = difference.abs_().max(dim=0)
        parts.append(
            torch.stack([*norms, (index + start).to(wide), part_e[index].to(wide), part_a[index].to(wide),
                         largest.to(wide)])
        )  # fmt: skip
    table = torch.stack(parts)
    norms = torch.linalg.vector_norm(table[:, :3], dim=0)
    best = table[table[:, 6].argmax()]
    return torch.cat([norms, best[3:6]]).unsqueeze(0)


def _row(pair: Pair, numbers: Sequence[float]) -> Difference:
    reference, accumulated, difference, index, expected, actual = numbers
    name, shape = pair.name, tuple(pair.shape)
    if math.isfinite(reference) and math.isfinite(accumulated):
        parts = 2 if pair.elements > pair.shape.numel() else 1  # of a complex element
        worst = Element(_unravel(int(index) // parts, shape), expected, actual) if difference > 0 else None
        return Difference(name, shape, reference, accumulated, difference, worst, "")
    if not math.isfinite(reference) and not math.isfinite(accumulated):
        reason = "not finite in both runs"
    else:
        reason = f"not finite in the {'accumulated' if math.isfinite(reference) else 'full-batch'} run only"
    return Difference(name, shape, reference, accumulated, math.nan, None, reason)


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    result = []
    for size in reversed(shape):
        result.append(index % size)
        index //= size
    return tuple(reversed(result))
