"""Copies of the weights, and how much of its old value one keeps that is updated as a moving average.

Shapes: S sampled elements of one parameter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from gaverify.audit.recording.sampling import Sample
from gaverify.audit.recording.values import plain
from gaverify.passes.walks import reached
from gaverify.thresholds import CLOSE_COPY, FEW_UNITS


class Fit(NamedTuple):
    """An update of an average, read as new = decay · old + (1 − decay) · weights.

    `slack` is how far rounding may have moved the decay; `exact` says that rounding alone is left over.
    """

    decay: float
    slack: float
    exact: bool


def rounding(weights: torch.Tensor, unit: float) -> float:
    """Returns how far an average may be off by rounding.

    Args:
        weights: Some elements of the weights, shape (S,).
        unit: The distance from 1 to the next number in the average's format.
    """
    return FEW_UNITS * unit * float(torch.linalg.vector_norm(weights))


def fitted(old: torch.Tensor, now: torch.Tensor, weights: torch.Tensor, allowed: float) -> Fit | None:
    """Returns the decay that explains an update best; None where old average and weights are alike, as any would do.

    Args:
        old: Some elements of the average before the update, shape (S,).
        now: The same after it.
        weights: The same elements of the weights that it follows.
        allowed: What `rounding` gives for them.
    """
    apart = old - weights
    size = float(torch.linalg.vector_norm(apart))
    if not size > allowed:
        return None
    decay = float((now - weights) @ apart) / size**2
    left = float(torch.linalg.vector_norm(now - weights - decay * apart))
    return Fit(decay, allowed / size, left <= allowed)


class Average:
    """One update of an averaged copy of a model whose call is known.

    Args:
        average: The averaged copy, before the update.
        model: The model that it follows.
    """

    def __init__(self, average: nn.Module, model: nn.Module) -> None:
        self._average = Sample(list(average.parameters()))
        self._old, self._weights = self._average.weights(), Sample(list(model.parameters())).weights()

    def decay(self) -> dict[str, Any]:
        """Returns the decay by which the average has been updated, and how far rounding may have moved it.

        Nothing is returned where the average was the weights themselves, which any decay leaves as they are.
        """
        if len(self._old) != len(self._weights):
            return {}
        kinds = [torch.finfo(p.dtype).eps for p in self._average.parameters if p.is_floating_point()]
        allowed = rounding(self._weights, max(kinds, default=1.0))
        found = fitted(self._old, self._average.weights(), self._weights, allowed)
        return {} if found is None else {"decay": found.decay, "slack": found.slack}


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
