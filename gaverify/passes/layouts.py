"""Where samples lie in a batch: its nested containers, the dimensions of its tensors, fingerprints of rows.

Shapes: B samples in the full batch, n in a micro-batch. A dimension that follows the batch has B·m and n·m entries, m
for each sample. m is called the fold: heads that are folded into the batch, two views of every sample.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

# The nested containers that a batch may be: their entries, and the same containers around other entries.


def leaves(node: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yields every leaf of a nested batch with its path, in order."""
    entries = children(node)
    if entries is None:
        yield path, node
        return
    for key, child in entries:
        yield from leaves(child, f"{path}{key}")


def rebuilt(node: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the same nested containers around `change(leaf)` of every leaf."""
    entries = children(node)
    if entries is None:
        return change(node)
    return with_children(node, [rebuilt(child, change) for _, child in entries])


def map_leaves(node: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Returns the same nested containers around `change(path, leaf)`; those in which nothing changes, as they are."""
    entries = children(node)
    if entries is None:
        return change(path, node)
    mapped = [map_leaves(child, change, f"{path}{key}") for key, child in entries]
    is_unchanged = all(new is old for new, (_, old) in zip(mapped, entries, strict=True))
    return node if is_unchanged else with_children(node, mapped)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is a tensor or an array with a shape that can be sliced."""
    return isinstance(leaf, torch.Tensor) or (hasattr(leaf, "__array__") and hasattr(leaf, "shape"))


def is_namedtuple(node: Any) -> bool:
    """Whether `node` is a tuple whose entries have names, each a field of one record."""
    return isinstance(node, tuple) and hasattr(node, "_fields")


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Returns the named entries of a container, or None for a leaf."""
    if is_array(node) or isinstance(node, str | bytes | type):
        return None
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if is_namedtuple(node):
        return [(f".{name}", getattr(node, name)) for name in node._fields]
    if isinstance(node, list | tuple):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    if dataclasses.is_dataclass(node):
        return [(f".{entry.name}", getattr(node, entry.name)) for entry in dataclasses.fields(node)]
    # A plain object with tensors, such as a graph's batch; one without any is a leaf: a configuration, a tokenizer.
    if hasattr(node, "__dict__") and any(isinstance(value, torch.Tensor) for value in vars(node).values()):
        return [(f".{name}", value) for name, value in vars(node).items()]
    return None


def with_children(node: Any, values: list[Any]) -> Any:
    """Returns a container of the same type as `node` around other entries."""
    if isinstance(node, Mapping):
        # A mapping that cannot be written to is rebuilt as a dict: its keys are what a loss reads.
        if not hasattr(node, "__setitem__"):
            return dict(zip(node, values, strict=True))
        result = copy.copy(node)
        for key, value in zip(list(node), values, strict=True):
            result[key] = value
        return result
    if is_namedtuple(node):
        return type(node)(*values)
    if isinstance(node, list | tuple):
        return type(node)(values)
    result = copy.copy(node)
    names = [e.name for e in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else list(vars(node))
    for name, value in zip(names, values, strict=True):
        object.__setattr__(result, name, value)  # reaches frozen dataclasses too; `result` is ours
    return result


# Fingerprints: a few numbers that agree to rounding where rows do, and digests, which agree where all bits do.
#
# Shapes: a tensor of shape (*rows, C) holds rows of C numbers.


_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_PERIOD = 1 << 16  # numbers of a row after which the directions start again, with another weight
_GOLDEN = 0.6180339887  # its multiples modulo 1 never repeat


def real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor without a graph, complex ones as pairs of numbers.

    The pairs lie in a last dimension twice as long; where that dimension would be the rows', in one of their own.
    """
    values = tensor.detach()
    if not values.is_complex():
        return values
    pairs = torch.view_as_real(values.resolve_conj())
    return pairs.flatten(-2) if pairs.dim() > 2 else pairs


def project_rows(values: torch.Tensor, count: int = 2) -> torch.Tensor:
    """Returns the projections of every row onto `count` fixed directions, 1 or 2, in the precision of `values`.

    The directions are cos(j²) and sin(j²): they follow no pattern that a layer would produce. A plain sum would not do:
    it is 0 for every row behind a LayerNorm, and 1 behind a softmax.

    Args:
        values: Floating-point numbers of shape (*rows, C).
        count: How many projections.

    Shapes: (*rows, count).
    """
    length = values.shape[-1]
    directions = _directions(min(_PERIOD, length), values.device, values.dtype)[:, :count]
    if length <= _PERIOD:
        return torch.matmul(values, directions)
    total = values.new_zeros(*values.shape[:-1], count)
    for number, piece in enumerate(values.split(_PERIOD, dim=-1)):
        weight = 1.0 + _GOLDEN * number % 1.0
        total += torch.matmul(piece, directions[: piece.shape[-1]]) * weight
    return total


def summaries(rows: torch.Tensor) -> torch.Tensor:
    """Returns two projections and the norm of every row, of shape (*rows, 3)."""
    return torch.cat([project_rows(rows), torch.linalg.vector_norm(rows, dim=-1, keepdim=True)], dim=-1)


def digest_of(named: Iterator[tuple[str, Any]] | Mapping[str, torch.Tensor | None]) -> str:
    """Returns a digest of tensors, arrays and plain values with their names; what else there is counts by its name."""
    digest = hashlib.sha256()
    for name, value in named.items() if isinstance(named, Mapping) else named:
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            _update(digest, value)
        elif value is not None and is_array(value):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode() + value.tobytes())
        elif isinstance(value, _PLAIN):
            digest.update(repr(value).encode())
    return digest.hexdigest()


def _update(digest: Any, tensor: torch.Tensor) -> None:
    """Takes the tensor's own memory on the host, without a copy where it lies there, and without NumPy."""
    dense = tensor.detach()
    if dense.is_nested:
        dense = dense.values()
    dense = (dense.to_dense() if dense.layout is not torch.strided else dense).cpu().contiguous()
    if dense.numel():
        digest.update((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))


@lru_cache(maxsize=32)
def _directions(length: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The two directions as columns; made on the device, so that nothing waits for a copy."""
    angles = torch.arange(1, length + 1, dtype=dtype, device=device).square_()
    return torch.stack([torch.cos(angles), torch.sin(angles)], dim=1)


# Where the samples lie in a tensor: which of its dimensions follow the batch, and which entries belong to a sample.


LayoutKind = Literal["rows", "global", "matrix", "selected", "mixed"]
LAYOUT_KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)
Shape = Sequence[int]


def changed_dimensions(full: Sequence[object], micro: Sequence[object]) -> list[int]:
    """Returns the dimensions in which two shapes of equally many differ."""
    return [at for at, (full_size, size) in enumerate(zip(full, micro, strict=True)) if full_size != size]


def take_entries(values: Any, dimension: int, entries: range | Sequence[int] | torch.Tensor) -> Any:
    """Returns some entries along a dimension of a tensor or an array, in a view where that is possible."""
    is_slice = isinstance(entries, range) and entries.step == 1
    if not isinstance(values, torch.Tensor):
        index = slice(entries.start, entries.stop) if is_slice else [int(at) for at in entries]  # type: ignore[union-attr]
        return values[(slice(None),) * dimension + (index,)] if dimension else values[index]
    if values.is_nested:  # neither nested nor sparse tensors can be sliced
        components = values.unbind()
        return torch.nested.as_nested_tensor([components[int(at)] for at in entries], layout=values.layout)
    if is_slice and values.layout is torch.strided:
        return values.narrow(dimension, entries.start, len(entries))  # type: ignore[union-attr]
    chosen = torch.as_tensor(entries, dtype=torch.int64, device=values.device)
    if values.layout is not torch.strided:
        return values.to_sparse_coo().index_select(dimension, chosen).to_sparse(layout=values.layout)
    return values.index_select(dimension, chosen)


def _fold(full_size: int, size: int, batch_size: int, count: int) -> int:
    fold = full_size // batch_size if batch_size else 0
    return fold if (full_size, size) == (fold * batch_size, fold * count) else 0


@dataclass(frozen=True)
class SampleDimension:
    """A dimension that follows the batch, and how it holds samples."""

    at: int
    """Its position; it need not be the first."""
    fold: int = 1
    """m; 0 where the sizes are no common multiple of B and n, as of a selection of tokens, or where B is not known."""
    inner: bool = False
    """Whether samples are the inner index of a folded dimension: two views of a batch, one after the other."""

    def entries_of(self, samples: range | Sequence[int], batch_size: int, device: torch.device) -> range | torch.Tensor:
        """Returns the entries that belong to some samples; a tensor of them, on `device`, where they lie apart."""
        is_contiguous = isinstance(samples, range) and samples.step == 1
        if is_contiguous and not self.inner:
            return range(samples.start * self.fold, samples.stop * self.fold)  # type: ignore[union-attr]
        if isinstance(samples, range):
            numbers = torch.arange(samples.start, samples.stop, samples.step, device=device)
        else:
            numbers = torch.tensor(samples, dtype=torch.int64, device=device)
        folds = torch.arange(self.fold, device=device)
        if self.inner:
            return (folds.unsqueeze(1) * batch_size + numbers).flatten()
        return (numbers.unsqueeze(1) * self.fold + folds).flatten()


@dataclass(frozen=True)
class SampleLayout:
    """All dimensions of a tensor that follow the batch, in order; none of a mask that is the same for every batch."""

    dimensions: tuple[SampleDimension, ...] = ()

    @classmethod
    def find(cls, full: Shape, micro: Shape, batch_size: int = 0, count: int = 0) -> SampleLayout | None:
        """Returns the layout by comparing two shapes: dimensions that differ follow the batch.

        Args:
            full: The shape for all samples.
            micro: The shape for some of them.
            batch_size: B; 0 where it is not known: every fold is 0 then.
            count: n.

        Returns:
            None where there are not equally many dimensions.
        """
        if len(full) != len(micro):
            return None
        changed = changed_dimensions(full, micro)
        return cls(tuple(SampleDimension(at, _fold(full[at], micro[at], batch_size, count)) for at in changed))

    @classmethod
    def find_leading(cls, full: Shape, micro: Shape, batch_size: int, count: int) -> SampleLayout | None:
        """Returns the layout of a tensor in which one dimension, the first or the second, holds all samples.

        Where n = B the shapes are the same: the first dimension with a multiple of B entries is taken.

        Returns:
            None where that is not so.
        """
        if count == batch_size and tuple(full) == tuple(micro):
            multiples = (at for at, size in enumerate(full[:2]) if batch_size and size and size % batch_size == 0)
            return next((cls((SampleDimension(at, full[at] // batch_size),)) for at in multiples), None)
        layout = cls.find(full, micro, batch_size, count)
        is_leading = layout is not None and layout.kind == "rows" and layout.first.at < 2
        return layout if is_leading else None

    @property
    def kind(self) -> LayoutKind:
        """The dimensions in one word.

        "rows": one dimension with m entries per sample; "global": the shape does not depend on the batch; "matrix":
        several dimensions grow with the batch; "selected": one dimension depends on which samples there are; "mixed":
        several dimensions of which one does.
        """
        is_multiple = all(dimension.fold for dimension in self.dimensions)
        if len(self.dimensions) < 2:
            return "global" if not self.dimensions else "rows" if is_multiple else "selected"
        return "matrix" if is_multiple else "mixed"

    @property
    def first(self) -> SampleDimension:
        """The first dimension that follows the batch; of a "global" layout the tensor's first."""
        return self.dimensions[0] if self.dimensions else SampleDimension(0)

    @property
    def inside(self) -> SampleLayout:
        """The other reading of the same dimensions: samples are the inner index of folded ones."""
        return SampleLayout(tuple(replace(dimension, inner=True) for dimension in self.dimensions))

    def take(self, values: Any, samples: range | Sequence[int], batch_size: int) -> Any:
        """Returns what belongs to some of B samples, in a view where that is possible."""
        device = values.device if isinstance(values, torch.Tensor) else torch.device("cpu")
        for dimension in self.dimensions:
            values = take_entries(values, dimension.at, dimension.entries_of(samples, batch_size, device))
        return values
