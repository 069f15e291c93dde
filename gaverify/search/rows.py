"""The rows of a micro-batch in a tensor of the full batch.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`; a tensor may hold m rows per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gaverify.errors import GaverifyError
from gaverify.passes.devices import widest
from gaverify.passes.fingerprints import real_numbers
from gaverify.passes.layouts import SampleLayout
from gaverify.torch_internals import tree_flatten, tree_leaves, tree_unflatten


class ControlFailed(GaverifyError):
    """A control run that could not be made; the message says why."""


def take_rows_of_all(value: Any, result: Any, start: int, stop: int, size: int, order: int | None = None) -> Any:
    """Returns the rows of a micro-batch for every tensor of a result; `order` as in `take_rows`.

    Raises:
        ControlFailed: The micro-batch's result has another form.
    """
    full_leaves, (parts, form) = tree_leaves(value), tree_flatten(result)
    if len(full_leaves) != len(parts):
        raise ControlFailed("the micro-batches' results have another form than the full batch's")
    rows = [
        take_rows(old, new, start, stop, size, order=order) if isinstance(new, torch.Tensor) else new
        for old, new in zip(full_leaves, parts, strict=True)
    ]
    return tree_unflatten(rows, form)


def take_rows(
    value: torch.Tensor,
    part: torch.Tensor,
    start: int,
    stop: int,
    size: int,
    cotangent: torch.Tensor | None = None,
    order: int | None = None,
) -> torch.Tensor:
    """Returns the rows of samples `start` to `stop - 1` of a full-batch tensor, in the shape of the micro-batch's.

    A dimension with several rows per sample may hold the samples as its outer or as its inner index (two views of a
    batch, one after the other): where the order is not known, the reading that comes closer to the micro-batch's own
    values is taken.

    Args:
        value: The full batch's tensor.
        part: The micro-batch's tensor.
        start: The first sample.
        stop: One past the last sample.
        size: B.
        cotangent: Takes its rows in place of those of `value`, which has its shape.
        order: 0: the samples are the outer index; 1: the inner one; None: not known.

    Raises:
        ControlFailed: The shapes do not correspond.
    """
    wanted = value if cotangent is None else cotangent
    # Equal shapes: the tensor has no rows of samples (statistics, a scalar), so that each micro-batch gets all of it.
    if value.shape == part.shape:
        return wanted.clone()
    # The same folded dimension can be read in two ways, and both give tensors of the wanted shape.
    readings = list(_list_readings(value, part.shape, start, stop, size))
    if len(readings) > 1 and order is not None:
        readings = [readings[order]]
    elif len(readings) > 1:
        full_numbers, part_numbers = (real_numbers(tensor).to(widest(tensor.device)) for tensor in (value, part))
        readings.sort(key=lambda take: float((take(full_numbers) - part_numbers).abs().sum()))
    return readings[0](wanted).clone()


def _list_readings(
    value: torch.Tensor, shape: Sequence[int], start: int, stop: int, size: int
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yields how the rows may be taken: with the samples as the outer, and where that differs as the inner index."""
    layout = SampleLayout.find(value.shape, shape, size, stop - start)
    if layout is None or layout.kind not in ("rows", "matrix"):
        raise ControlFailed(f"shapes {list(value.shape)} and {list(shape)} do not correspond")
    samples = range(start, stop)
    yield partial(layout.take, samples=samples, batch_size=size)
    if max(dimension.fold for dimension in layout.dimensions) > 1:
        yield partial(layout.inside.take, samples=samples, batch_size=size)
