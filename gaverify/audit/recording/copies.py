"""Copies of the weights: tensors of a trained parameter's shape that begin close to it.

Shapes: S sampled elements of one parameter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gaverify.audit.recording.values import plain
from gaverify.passes.walks import reached
from gaverify.thresholds import CLOSE_COPY

_FEWEST = 3  # elements of a parameter: a decay fits any two values


@dataclass(eq=False)
class Landmark:
    """A trained parameter whose copies are looked for, and the positions of its elements that are read."""

    optimizer: int
    parameter: torch.Tensor
    shape: tuple[int, ...]  # of its values in this process
    positions: torch.Tensor


@dataclass(eq=False)
class Copy:
    """A tensor that began close to a parameter; `values` are its elements at the last look, shape (S,)."""

    landmark: Landmark
    tensor: weakref.ref[torch.Tensor]
    values: torch.Tensor
    unit: float
    moves: bool = False


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's numbers; None where they are too few, of no use, or gone: sharding frees what nobody needs."""
    values = plain(tensor)
    if values is None or values.layout is not torch.strided or not values.is_floating_point():
        return None
    gone = values.untyped_storage().nbytes() < values.element_size()
    return None if gone or values.numel() < _FEWEST else values


def tensors_of(shapes: set[tuple[int, ...]], taken: set[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every tensor of the process of some shapes that is no result inside a graph, with its values."""
    kinds = _kinds()
    for thing in gc.get_objects():
        if type(thing) in kinds and id(thing) not in taken:
            values = values_of(thing)
            if values is not None and tuple(values.shape) in shapes and thing.grad_fn is None:
                yield thing, values


def _kinds() -> set[type]:
    """`torch.Tensor` and every class made from it."""
    return set(reached([torch.Tensor], type.__subclasses__))


def copy_of(landmark: Landmark, tensor: torch.Tensor, weights: torch.Tensor) -> Copy | None:
    """A tensor as a copy of a parameter; None where its values are others, or it is the parameter by another name."""
    values, own = values_of(tensor), values_of(landmark.parameter)
    if values is None or own is None or values.data_ptr() == own.data_ptr():
        return None
    elements = read([(tensor, landmark.positions)])[0]
    size = float(torch.linalg.vector_norm(weights - weights.mean()))
    if not float(torch.linalg.vector_norm(elements - weights)) < CLOSE_COPY * size:
        return None
    return Copy(landmark, weakref.ref(tensor), elements, torch.finfo(values.dtype).eps)


def is_same(copy: Copy, old: Copy, weights: dict[int, torch.Tensor]) -> bool:
    """Whether two copies are equal to one rounding of the weights."""
    size = float(torch.linalg.vector_norm(weights[id(old.landmark)]))
    return copy.landmark is old.landmark and bool(
        torch.linalg.vector_norm(copy.values - old.values) <= copy.unit * size
    )


@torch.no_grad()
def read(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the chosen elements of every tensor as float64 on the CPU; of one device and type in one transfer."""
    parts = []
    for tensor, chosen in pairs:
        values = plain(tensor)
        assert values is not None
        parts.append(values.reshape(-1)[chosen.to(values.device)])
    if len({(part.device, part.dtype) for part in parts}) == 1:
        return list(torch.cat(parts).to("cpu", torch.float64).split([len(part) for part in parts]))
    return [part.to("cpu", torch.float64) for part in parts]
