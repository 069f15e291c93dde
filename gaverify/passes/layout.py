"""Where a tensor holds its samples: in the one dimension whose sizes are B·m and n·m.

Shapes: B samples in the full batch, n in the micro-batch, m rows for each sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class SampleLayout:
    """A dimension whose size is another one in the micro-batch, and how it holds samples.

    Args:
        dimension: It need not be the first.
        fold: m; 0 where the sizes are no common multiple of the numbers of samples, so that it does not follow them.
        inner: Whether samples are the inner index of a folded dimension (two views of a batch, one after the other).
    """

    dimension: int
    fold: int
    inner: bool = False

    @property
    def inside(self) -> SampleLayout:
        """The other reading of the same dimension."""
        return replace(self, inner=True)


def layouts_of(full: Sequence[int], micro: Sequence[int], batch_size: int, count: int) -> list[SampleLayout] | None:
    """Returns an entry for every dimension that differs; None where there are not equally many dimensions.

    Args:
        full: The shape for all samples.
        micro: The shape for `count` of them.
        batch_size: B.
        count: n.
    """
    if len(full) != len(micro):
        return None
    found = []
    for dim, (whole, part) in enumerate(zip(full, micro, strict=True)):
        if whole != part:
            fold = whole // batch_size
            found.append(SampleLayout(dim, fold if (whole, part) == (fold * batch_size, fold * count) else 0))
    return found


def taken(tensor: torch.Tensor, layout: SampleLayout, start: int, stop: int, batch_size: int) -> torch.Tensor:
    """Returns the rows of samples `start` to `stop - 1` of B, in a view where that is possible."""
    dim, fold = layout.dimension, layout.fold
    if not layout.inner:
        return tensor.narrow(dim, start * fold, (stop - start) * fold)
    rows: torch.Tensor = tensor.unflatten(dim, (fold, batch_size))
    return rows.narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)
