"""Moving averages of the weights: how much of its old value one keeps, and those that no call of torch's announces.

What follows the weights is known by what it does. A tensor of a trained parameter's shape that begins close to it and
becomes d · (its old value) + (1 − d) · (the parameter) has been updated as an average is, wherever it is kept (a dict,
a copied module, an object of a library) and however it is written (in place, or as a new tensor). Copies that never
move, and those that become the weights themselves, are no averages.

Shapes: S sampled elements of one parameter.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from gaverify.audit.recording.values import TOTAL, Sample, plain, positions, read
from gaverify.audit.recording.watching import Watch
from gaverify.passes.walks import reached
from gaverify.thresholds import CLOSE_COPY, FEW_UNITS

_READ = 128  # elements of a large parameter
_LANDMARKS = 6  # parameters of each optimizer whose copies are looked for
_COPIES = 16  # copies of each that are looked at
_SEARCHES = 40  # searches through all objects in a run: each takes some hundredths of a second
_FIRST = 3  # of them while no copy has been found
_FEWEST = 3  # elements of a parameter: a decay fits any two values


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
    kinds = set(reached([torch.Tensor], type.__subclasses__))
    for thing in gc.get_objects():
        if type(thing) in kinds and id(thing) not in taken:
            values = values_of(thing)
            if values is not None and tuple(values.shape) in shapes and thing.grad_fn is None:
                yield thing, values


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


@dataclass(eq=False)
class Move:
    """One update of an average between two looks; without a decay where that cannot be told from rounding."""

    optimizers: set[int]
    decay: float | None = None
    slack: float = 0.0

    def values(self) -> dict[str, Any]:
        """Returns what its event holds."""
        known = {} if self.decay is None else {"decay": self.decay, "slack": self.slack}
        return {"optimizers": sorted(self.optimizers), **known}


@dataclass(eq=False)
class Followers:
    """Copies of a script's weights, and what has become of them since the last look.

    Args:
        watch: The optimizers.
        on: Whether this run looks for copies at all.
    """

    watch: Watch
    on: bool = True
    _landmarks: list[Landmark] = field(default_factory=list)
    _copies: list[Copy] = field(default_factory=list)
    _searches: int = 0

    def search(self) -> None:
        """Looks for copies of the weights, a few times at most, where none is known yet."""
        if self.on and not self._copies and self._searches < _FIRST:
            self._search()

    def look(self) -> list[Move]:
        """Returns the updates of averages since the last look; those of different decay are different ones."""
        if not self._copies:
            return []
        weights = self._weights()
        moves: list[Move] = []
        lost: list[Copy] = []
        for copy, now in list(self._now()):
            if now is None:
                lost.append(copy)
            elif not torch.equal(now, copy.values):
                moves += self._moved(copy, copy, now, weights)
                copy.values = now
        if lost:
            moves += self._replaced(lost, weights)
        return _together(moves)

    def forget(self) -> None:
        """Takes everything as it is: an update of an average was recorded by its call."""
        for copy, now in self._now():
            if now is not None:
                copy.values = now

    # -- what lies behind them ---------------------------------------------------------------------------------------

    def _moved(self, old: Copy, new: Copy, now: torch.Tensor, weights: dict[int, torch.Tensor]) -> list[Move]:
        """The update that made `now` of an old copy, if it is one of an average."""
        own = weights[id(old.landmark)]
        if torch.equal(now, own):
            return []
        allowed = rounding(own, new.unit)
        fit = fitted(old.values, now, own, allowed)
        if fit is None:
            known = float(torch.linalg.vector_norm(now - own)) <= allowed
            return [Move({old.landmark.optimizer})] if known else []
        known = fit.exact and fit.decay > fit.slack
        return [Move({old.landmark.optimizer}, fit.decay, fit.slack)] if known else []

    def _replaced(self, lost: list[Copy], weights: dict[int, torch.Tensor]) -> list[Move]:
        """The updates that made new tensors of copies that are gone."""
        known = {id(copy.tensor()) for copy in self._copies}
        self._copies = [copy for copy in self._copies if copy not in lost]
        if self._searches >= _SEARCHES:
            return []
        self._search([*weights.values(), *(copy.values for copy in lost)])
        moves: list[Move] = []
        for copy in self._copies:
            if id(copy.tensor()) in known:
                continue
            rounded = copy.unit * float(torch.linalg.vector_norm(weights[id(copy.landmark)]))
            for old in [each for each in lost if each.landmark is copy.landmark]:
                if float(torch.linalg.vector_norm(copy.values - old.values)) <= rounded:
                    continue  # a copy of its own, which there was no room for before
                found = self._moved(old, copy, copy.values, weights)
                if found:
                    moves += found
                    lost.remove(old)
                    break
        return moves

    def _search(self, own: Iterable[torch.Tensor] = ()) -> None:
        """Adds the copies that are not known yet; `own` are samples of this class's, which are none."""
        self._searches += 1
        self._choose()
        shapes: dict[tuple[int, ...], list[Landmark]] = {}
        for landmark in self._landmarks:
            shapes.setdefault(landmark.shape, []).append(landmark)
        weights = self._weights()
        samples = [*own, *weights.values(), *(copy.values for copy in self._copies)]
        memory = {sample.untyped_storage().data_ptr() for sample in samples}
        taken = {id(tensor) for tensor in [*self.watch.all_parameters(), *(copy.tensor() for copy in self._copies)]}
        counts = {id(landmark): sum(copy.landmark is landmark for copy in self._copies) for landmark in self._landmarks}
        for tensor, values in tensors_of(set(shapes), taken):
            if values.untyped_storage().data_ptr() in memory:
                continue
            for landmark in shapes[tuple(values.shape)]:
                if counts[id(landmark)] < _COPIES and (copy := copy_of(landmark, tensor, weights[id(landmark)])):
                    self._copies.append(copy)
                    counts[id(landmark)] += 1

    def _choose(self) -> None:
        """Chooses parameters of every optimizer, those of rare shapes first: few tensors are taken for their copies."""
        known = {landmark.optimizer for landmark in self._landmarks}
        for index in range(len(self.watch)):
            if index in known:
                continue
            trained = (parameter for parameter in self.watch.parameters(index) if parameter.requires_grad)
            found = [(parameter, values) for parameter in trained if (values := values_of(parameter)) is not None]
            alike = Counter(tuple(values.shape) for _, values in found)
            found.sort(key=lambda pair: (alike[tuple(pair[1].shape)], -pair[1].numel()))
            for at, (parameter, values) in enumerate(found[:_LANDMARKS]):
                chosen = positions(at, values.numel(), values.numel() * TOTAL // _READ).to(values.device)
                self._landmarks.append(Landmark(index, parameter, tuple(values.shape), chosen))

    def _weights(self) -> dict[int, torch.Tensor]:
        values = read([(landmark.parameter, landmark.positions) for landmark in self._landmarks])
        return {id(landmark): each for landmark, each in zip(self._landmarks, values, strict=True)}

    def _now(self) -> Iterator[tuple[Copy, torch.Tensor | None]]:
        """The elements of every copy as they are now; None for what is gone."""
        copies = list(self._copies)
        tensors = [copy.tensor() for copy in copies]
        alive = [(t, copy.landmark.positions) for copy, t in zip(copies, tensors, strict=True) if t is not None]
        values = iter(read(alive))
        for copy, tensor in zip(copies, tensors, strict=True):
            yield copy, None if tensor is None else next(values)


def _together(moves: list[Move]) -> list[Move]:
    """Returns the updates by decay: copies of one average moved alike; those that tell no decay are one of them."""
    known = sorted((move for move in moves if move.decay is not None), key=lambda move: move.decay or 0.0)
    groups: list[Move] = []
    for move in known:
        last = groups[-1] if groups else None
        if last is None or (move.decay or 0.0) - (last.decay or 0.0) > move.slack + last.slack:
            groups.append(Move(set(move.optimizers), move.decay, move.slack))
            continue
        last.optimizers |= move.optimizers
        if move.slack < last.slack:
            last.decay, last.slack = move.decay, move.slack
    if moves and not groups:
        return [Move(set().union(*(move.optimizers for move in moves)))]
    return groups
