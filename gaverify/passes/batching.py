"""The problem to verify; how many samples its batch holds, and its micro-batches.

Shapes: B samples, K micro-batches of n_k samples each.

A tensor carries its samples along the leading dimension. A list or tuple is read in one of two ways: as a *structure*
whose entries each carry B samples (what a `DataLoader` yields), or as B *samples* (variable lengths). The reading that
agrees with the rest of the batch wins; `batch_size` settles what stays open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

from gaverify.errors import ProblemError
from gaverify.passes.layouts import children, is_array, is_namedtuple, leaves, rebuilt, take_entries, with_children
from gaverify.passes.precision import dtype_like

# The problem to verify: a model, a loss and a batch.


Loss = Callable[[nn.Module, Any], Any]
Split = Callable[[Any, int, int], Any]


@dataclass
class Problem:
    """A model, a loss and a batch whose accumulated gradient is to be compared with its full-batch gradient.

    Args:
        model: Any `torch.nn.Module`; several modules go into one `nn.ModuleDict`.
        loss: `loss(model, batch)` runs the forward pass and returns the loss of exactly that (micro-)batch: a scalar
            tensor, or an object (or mapping) whose `.loss` is one.
        batch: The full batch: tensors, arrays, mappings, dataclasses, lists and tuples nested in each other.
        split: `split(batch, start, stop)` returns the samples `start` to `stop - 1` as a micro-batch; for batches that
            a plain slice of the leading dimension gets wrong (graphs, padding to the longest row).
        batch_size: B, where the leading dimensions do not tell it.
        name: How reports call it.
    """

    model: nn.Module
    loss: Loss
    batch: Any
    split: Split | None = None
    batch_size: int | None = None
    name: str | None = None


# Batches: how many samples one holds, and its micro-batches.


_DEEPEST = 100
"""Containers in each other; a batch that nests deeper contains itself, or is no batch."""


def batch_size_of(batch: Any, steps: int = 1, batch_size: int | None = None, split: Split | None = None) -> int:
    """Returns B, the number of samples in `batch`.

    Args:
        batch: The nested batch.
        steps: K; a reading with fewer than K samples is only taken when there is no other.
        batch_size: Settles the question where it is given.
        split: With a user's split the leading dimensions may disagree; `len(batch)` is then asked as well.

    Raises:
        ProblemError: The leading dimensions disagree, nothing in the batch has one, or the batch contains itself.
    """
    _check_nesting(batch)
    if batch_size is not None:
        return batch_size
    candidates = _candidates(batch)
    # Inputs of 8 and targets of 6 are a mistake; read as two samples they would hide it.
    if _fields_disagree(batch):
        candidates = []
    if candidates:
        # A reading with fewer samples than micro-batches cannot be meant, but fields of one sample are no samples.
        usable = candidates if _may_hold_samples(batch) else candidates[:1]
        return next((size for size in usable if size >= steps), candidates[0])
    for name in ("num_graphs", "batch_size"):
        size = getattr(batch, name, None)
        if isinstance(size, int):
            return size
    if split is not None and hasattr(batch, "__len__") and not isinstance(batch, Mapping | tuple):
        return len(batch)
    shapes = ", ".join(f"`{path}` {_shape(leaf)}" for path, leaf in leaves(batch) if _leading(leaf) is not None)
    if not shapes:
        raise ProblemError(
            "the batch holds no tensor with a leading batch dimension; "
            "return tensors, or give `split` and `batch_size` on the Problem"
        )
    raise ProblemError(
        f"the leading dimensions of the batch disagree: {shapes}; make them all B, "
        "or give the Problem a `split(batch, start, stop)` and its `batch_size`"
    )


def _check_nesting(node: Any, path: str = "batch", above: tuple[int, ...] = ()) -> None:
    """Raises for a container that stands in itself, or deeper than any batch is."""
    entries = children(node)
    if entries is None:
        return
    if id(node) in above:
        raise ProblemError(f"the batch contains itself: `{path}` is one of the containers around it; leave it out")
    if len(above) == _DEEPEST:
        raise ProblemError(f"the batch has more than {_DEEPEST} nested containers; return a flatter one")
    for key, child in entries:
        _check_nesting(child, f"{path}{key}", (*above, id(node)))


def other_reading(batch: Any, batch_size: int) -> str:
    """Returns a hint where the batch could hold another number of samples than `batch_size`; empty otherwise."""
    sizes = [size for size in _candidates(batch) or [] if size != batch_size]
    if not sizes or not _may_hold_samples(batch):
        return ""
    return f"; the batch was read as {batch_size} samples: if it holds {sizes[0]}, give batch_size={sizes[0]}"


def _may_hold_samples(batch: Any) -> bool:
    """Whether a container of the batch is a list of entries that are alike, as samples are.

    A tuple, or a list such as `[inputs, targets]`, is what loaders yield for fields.
    """
    if isinstance(batch, list) and len({_likeness(entry) for entry in batch}) == 1:
        return True
    return any(_may_hold_samples(child) for _, child in children(batch) or [])


def _likeness(entry: Any) -> tuple[Any, ...]:
    """Traits that entries which are samples share: their type, and of tensors the precision and the dimensions."""
    return (type(entry), getattr(entry, "dtype", None), getattr(entry, "ndim", None))


def micro_batch_sizes(batch_size: int, steps: int) -> tuple[int, ...]:
    """Returns n_1 … n_K as a `DataLoader` would cut them: equal ones, and a shorter last one.

    If equal sizes leave fewer than K micro-batches (9 samples, K = 4), the sizes differ by at most one instead.

    Raises:
        ProblemError: K < 1 or K > B.
    """
    if steps < 1:
        raise ProblemError(f"accumulation needs at least one micro-batch, got steps = {steps}; write steps = 1 or more")
    if batch_size < 1:
        raise ProblemError("the batch holds no samples: its leading dimension is 0; return at least one sample")
    if steps > batch_size:
        raise ProblemError(
            f"steps = {steps} micro-batches cannot be cut from a batch of {batch_size} samples; "
            f"lower steps to {batch_size} or less, or raise the batch size"
        )
    size = -(-batch_size // steps)
    # As a `DataLoader` without `drop_last` cuts an epoch.
    if (steps - 1) * size < batch_size:
        return (size,) * (steps - 1) + (batch_size - (steps - 1) * size,)
    small, larger = divmod(batch_size, steps)
    return (small + 1,) * larger + (small,) * (steps - larger)


def take(batch: Any, start: int, stop: int, batch_size: int, split: Split | None = None) -> Any:
    """Returns the samples `start` to `stop - 1` of `batch_size`; what has no samples passes through."""
    if split is not None:
        return split(batch, start, stop)
    return _take(batch, range(start, stop), batch_size)


def draw_batch(batch: Any, batch_size: int, seed: int) -> Any:
    """Returns a second batch of as many samples, drawn from this one with replacement; what has none passes through."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    rows = torch.randint(batch_size, (batch_size,), generator=generator, device="cpu")
    return _take(batch, rows.tolist(), batch_size)


def fresh(batch: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """Returns a copy of `batch` that a forward pass may change, optionally on another device and in another precision.

    Only floating-point and complex tensors change precision. A tensor that stands in two places stays one tensor.
    """
    memo: dict[int, Any] = {}

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in memo:
            target = dtype_like(leaf.dtype, dtype)
            moved = leaf.detach().to(device=device or leaf.device, dtype=target, copy=True)
            # Kept by identity: a loss may compare a tensor with itself in two places of the batch.
            memo[id(leaf)] = moved.requires_grad_(leaf.requires_grad)
        return memo[id(leaf)]

    return rebuilt(batch, copy_leaf)


def move_split(split: Split, device: torch.device | None, dtype: torch.dtype | None) -> Split:
    """Returns a user's split whose micro-batches lie where the batch was moved to: it may make tensors of its own."""

    @wraps(split)
    def splitting(batch: Any, start: int, stop: int) -> Any:
        return fresh(split(batch, start, stop), device, dtype)

    return splitting


def _leading(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:  # it has a size, but no shape
        return int(leaf.size(0))
    return int(leaf.shape[0]) if is_array(leaf) and len(leaf.shape) > 0 else None


def _shape(leaf: Any) -> list[Any]:
    nested = isinstance(leaf, torch.Tensor) and leaf.is_nested
    return [_leading(leaf), "nested"] if nested else list(leaf.shape)


def _candidates(node: Any) -> list[int] | None:
    """Possible numbers of samples in `node`, best first; None where anything goes, [] where its entries disagree."""
    entries = children(node)
    if entries is None:
        leading = _leading(node)
        return None if leading is None else [leading]
    structure = _common_sizes([_candidates(child) for _, child in entries])
    if not isinstance(node, list | tuple) or is_namedtuple(node):
        return structure
    # Nothing in it tells a number of samples.
    if structure is None:
        return None  # a list of names or numbers: split where its length is B, passed through otherwise
    return _readings(node, structure)


def _readings(node: list[Any] | tuple[Any, ...], structure: list[int]) -> list[int]:
    """Both readings of a list or tuple: entries that are records speak for samples, tensors for a structure."""
    records = len(node) > 0 and all(
        isinstance(entry, Mapping | tuple) or (dataclasses.is_dataclass(entry) and not isinstance(entry, type))
        for entry in node
    )
    ordered = [len(node), *structure] if records and isinstance(node, list) else [*structure, len(node)]
    return list(dict.fromkeys(ordered))


def _fields_disagree(batch: Any) -> bool:
    """Whether a batch is a tuple of tensors of different lengths: inputs and targets, where a list would be samples."""
    if not isinstance(batch, tuple) or is_namedtuple(batch) or not all(is_array(entry) for entry in batch):
        return False
    return len({_leading(entry) for entry in batch} - {None}) > 1


def _common_sizes(options: list[list[int] | None]) -> list[int] | None:
    constrained = [option for option in options if option is not None]
    if not constrained:
        return None
    return [size for size in constrained[0] if all(size in option for option in constrained[1:])]


def _take(node: Any, rows: Sequence[int], size: int) -> Any:
    entries = children(node)
    if entries is None:
        return take_entries(node, 0, rows) if _leading(node) == size else node
    if isinstance(node, list | tuple) and not is_namedtuple(node) and len(node) == size:
        structure = _common_sizes([_candidates(child) for _, child in entries])
        # Both readings may be possible (B fields of B rows): the one that gave the batch's size is cut.
        if not structure or size not in structure or _readings(node, structure)[0] == len(node) != structure[0]:
            return type(node)(node[rows.start : rows.stop] if isinstance(rows, range) else [node[row] for row in rows])
    return with_children(node, [_take(child, rows, size) for _, child in entries])
