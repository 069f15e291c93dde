"""Gradients as a run keeps and stores them: the values of small parameters, the sketch and the norm of each other one.

A sketch adds as the gradient does: the difference of two sketches is that of their difference, and shards' ones add
up to the whole parameter's. Its signs hang on the optimizer, the place of the parameter in it, and the position of
the element in the whole parameter: all processes of an audit agree on them, whatever they call the parameter.

Shapes: W buckets of a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy

import torch

from gaverify.audit.recording.values import Sample, plain, same, shard_of
from gaverify.audit.same_data import StoredGradients
from gaverify.passes.precision import widest
from gaverify.passes.sketches import sum_by_bucket
from gaverify.records.events import Shard
from gaverify.thresholds import KEPT_ELEMENTS, MOST_WIDE_SKETCHES, SKETCH_WIDTHS

_SLICE = 1 << 20  # elements whose norm is taken at once, and of a cut row that is laid into the whole parameter


class KeptGradients:
    """The gradients of an optimizer's parameters as they were when this was made.

    Args:
        optimizer: Its number.
        sample: The elements of them that are read one by one.
        sampled: Those elements, as `Sample.gradients` reads them.
        only: The place of the one parameter that is kept; None: all are.
    """

    def __init__(self, optimizer: int, sample: Sample, sampled: torch.Tensor, *, only: int | None = None) -> None:
        self.sampled, self._sizes = sampled, sample.sizes
        self.sampled_from_whole = sample.gradients_from_whole()
        """The elements that a run with whole parameters samples; None where this process holds no shards."""
        large = [math.prod(parameter.shape) > KEPT_ELEMENTS for parameter in sample.parameters]
        width = SKETCH_WIDTHS[sum(large) > MOST_WIDE_SKETCHES]
        self._values: dict[int, torch.Tensor] = {}
        self._sketches: dict[int, torch.Tensor] = {}
        self._norms: dict[int, torch.Tensor] = {}
        for at, parameter in enumerate(sample.parameters):
            gradient = None if parameter.grad is None or only not in (None, at) else plain(parameter.grad)
            if gradient is None:
                continue
            if not large[at]:
                # A lazy clone shares memory until torch sees a write, and CUDA's fused kernels write unseen.
                self._values[at] = gradient.clone()
                continue
            dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
            shape = tuple(parameter.shape)
            self._sketches[at] = sketch_piece(dense, f"{optimizer}.{at}", width, shape, shard_of(parameter))
            self._norms[at] = _norm_of(dense)

    def differs(self, later: KeptGradients) -> bool:
        """Whether gradients have changed between this and a later look; NaN that stays NaN has not."""
        if not same(self.sampled, later.sampled):
            return True
        for before, now in ((self._values, later._values), (self._sketches, later._sketches)):
            if before.keys() != now.keys() or not all(same(element, now[at]) for at, element in before.items()):
                return True
        return False

    def replaced_by(self, others: Mapping[int, KeptGradients]) -> KeptGradients:
        """Returns these gradients with those of some parameters, by their place, as they were kept alone."""
        replaced, pieces = copy(self), list(self.sampled.split(self._sizes))
        for at, replacement in others.items():
            replaced._values = replaced._values | replacement._values
            replaced._sketches = replaced._sketches | replacement._sketches
            replaced._norms = replaced._norms | replacement._norms
            pieces[at] = replacement.sampled
        replaced.sampled = torch.cat(pieces)
        return replaced

    def to_storage(self, divisor: float, left_out: Collection[int]) -> StoredGradients:
        """Returns what is written of them, on the host.

        Args:
            divisor: The optimizer's own scale, which is taken out.
            left_out: Places of parameters that are not written.
        """
        parts = (
            {at: part for at, part in parts.items() if at not in left_out}
            for parts in (self._values, self._sketches, self._norms)
        )
        values, sketches, norms = parts
        if divisor != 1.0:
            values = {at: value / divisor for at, value in values.items()}
        return StoredGradients(
            {at: value.cpu() for at, value in values.items()},
            {at: sketch / divisor for at, sketch in _fetch(sketches).items()},
            {at: float(norm) / abs(divisor) for at, norm in _fetch(norms).items()},
        )


def _fetch(numbers: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Returns tensors of one shape as float64 on the host, after one transfer for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for at, number in numbers.items():
        by_device.setdefault(number.device, []).append(at)
    fetched: dict[int, torch.Tensor] = {}
    for places in by_device.values():
        table = torch.stack([numbers[at] for at in places]).cpu().double()
        fetched |= dict(zip(places, table, strict=True))
    return fetched


def _norm_of(dense: torch.Tensor) -> torch.Tensor:
    """Returns the norm of a gradient where it is, slice by slice."""
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    wide = widest(real.device)
    parts = [torch.linalg.vector_norm(part, dtype=wide) for part in real.reshape(-1).split(_SLICE)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts)) if parts else real.new_zeros((), dtype=wide)
    return norm


def sketch_piece(
    piece: torch.Tensor, name: str, width: int, shape: Sequence[int], shard: Shard | None = None
) -> torch.Tensor:
    """Returns the sketch of a parameter's gradient, shape (W,), where it is.

    Args:
        piece: The part of it that this process holds.
        name: Decides its signs.
        width: W.
        shape: The shape of the whole parameter.
        shard: The place of the piece in it; None where this is all of it.
    """
    if piece.is_complex():
        piece, shape = torch.view_as_real(piece.resolve_conj()), (*shape, 2)
        shard = shard and Shard((*shard.offset, 0), (*shard.shape, 2))
    if shard is None or piece.shape[1:] == tuple(shape)[1:]:
        start = math.prod(shape[1:]) * shard.offset[0] if shard is not None else 0
        return sum_by_bucket(piece.reshape(-1), name, width, start)
    # If the cut is along a later dimension, the elements do not follow each other: some rows at a time are made whole.
    row, first = math.prod(shape[1:]), shard.offset[0]
    total = torch.zeros(width, dtype=widest(piece.device), device=piece.device)
    count = max(1, _SLICE // max(row, 1))
    for at in range(0, len(piece), count):
        part = piece[at : at + count]
        rows = part.new_zeros((len(part), *shape[1:]))
        rows[(slice(None), *shard.slices[1:])] = part
        total += sum_by_bucket(rows.reshape(-1), name, width, (first + at) * row)
    return total
