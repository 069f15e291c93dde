"""Moving averages of the weights that a script, or a library, keeps by hand: no call of torch's announces them.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gaverify.audit.recording.averages import fitted, rounding
from gaverify.audit.recording.sampling import TOTAL, positions
from gaverify.audit.recording.values import plain
from gaverify.audit.recording.watching import Watch

_READ = 128  # elements of a large parameter
_FEWEST = 3  # elements of a parameter: a decay fits any two values
_LANDMARKS = 6  # parameters of each optimizer whose copies are looked for
_COPIES = 16  # copies of each that are looked at
_SEARCHES = 40  # searches through all objects in a run: each takes some hundredths of a second
_FIRST = 3  # of them while no copy has been found
_CLOSE = 0.5  # a copy is less far from the weights than this share of their size; other weights are 1.4 times as far


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

    def moved(self) -> bool:
        """Whether a copy that has moved before has done so since the last look; remembers nothing."""
        return any(now is None or not torch.equal(now, copy.values) for copy, now in self._now(moving=True))

    @property
    def moving(self) -> bool:
        """Whether any copy has been updated as an average is."""
        return any(copy.moves for copy in self._copies)

    # -- what lies behind them ---------------------------------------------------------------------------------------

    def _moved(self, old: Copy, new: Copy, now: torch.Tensor, weights: dict[int, torch.Tensor]) -> list[Move]:
        """The update that made `now` of an old copy, if it is one of an average."""
        own = weights[id(old.landmark)]
        if torch.equal(now, own):
            return []
        allowed = rounding(own, new.unit)
        fit = fitted(old.values, now, own, allowed)
        move = Move({old.landmark.optimizer})
        if fit is None:
            if float(torch.linalg.vector_norm(now - own)) > allowed:
                return []
        elif not fit.exact or fit.decay <= fit.slack:
            return []
        else:
            move = Move({old.landmark.optimizer}, fit.decay, fit.slack)
        new.moves = True
        return [move]

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
            for old in lost:
                if _is_same(copy, old, weights):
                    continue  # a copy of its own, which there was no room for before
                found = self._moved(old, copy, copy.values, weights) if old.landmark is copy.landmark else []
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
        for tensor, values in _tensors(set(shapes), taken):
            if values.untyped_storage().data_ptr() in memory:
                continue
            for landmark in shapes[tuple(values.shape)]:
                if counts[id(landmark)] < _COPIES and (copy := _copy_of(landmark, tensor, weights[id(landmark)])):
                    self._copies.append(copy)
                    counts[id(landmark)] += 1

    def _choose(self) -> None:
        """Chooses parameters of every optimizer, those of rare shapes first: few tensors are taken for their copies."""
        known = {landmark.optimizer for landmark in self._landmarks}
        for index in range(len(self.watch)):
            if index in known:
                continue
            trained = (parameter for parameter in self.watch.parameters(index) if parameter.requires_grad)
            found = [(parameter, values) for parameter in trained if (values := _values(parameter)) is not None]
            alike = Counter(tuple(values.shape) for _, values in found)
            found.sort(key=lambda pair: (alike[tuple(pair[1].shape)], -pair[1].numel()))
            for at, (parameter, values) in enumerate(found[:_LANDMARKS]):
                chosen = positions(at, values.numel(), values.numel() * TOTAL // _READ).to(values.device)
                self._landmarks.append(Landmark(index, parameter, tuple(values.shape), chosen))

    def _weights(self) -> dict[int, torch.Tensor]:
        read = _read([(landmark.parameter, landmark.positions) for landmark in self._landmarks])
        return {id(landmark): values for landmark, values in zip(self._landmarks, read, strict=True)}

    def _now(self, moving: bool = False) -> Iterator[tuple[Copy, torch.Tensor | None]]:
        """The elements of every copy as they are now; None for what is gone."""
        copies = [copy for copy in self._copies if copy.moves or not moving]
        tensors = [copy.tensor() for copy in copies]
        alive = [(t, copy.landmark.positions) for copy, t in zip(copies, tensors, strict=True) if t is not None]
        values = iter(_read(alive))
        for copy, tensor in zip(copies, tensors, strict=True):
            yield copy, None if tensor is None else next(values)


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's numbers; None where they are too few, of no use, or gone: sharding frees what nobody needs."""
    values = plain(tensor)
    if values is None or values.layout is not torch.strided or not values.is_floating_point():
        return None
    gone = values.untyped_storage().nbytes() < values.element_size()
    return None if gone or values.numel() < _FEWEST else values


def _tensors(shapes: set[tuple[int, ...]], taken: set[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every tensor of the process of some shapes that is no result inside a graph, with its values."""
    kinds = _kinds()
    for thing in gc.get_objects():
        if type(thing) in kinds and id(thing) not in taken:
            values = _values(thing)
            if values is not None and tuple(values.shape) in shapes and thing.grad_fn is None:
                yield thing, values


def _kinds() -> set[type]:
    """`torch.Tensor` and every class made from it."""
    found: set[type] = set()
    waiting: list[type] = [torch.Tensor]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            waiting += type.__subclasses__(kind)
    return found


def _copy_of(landmark: Landmark, tensor: torch.Tensor, weights: torch.Tensor) -> Copy | None:
    """A tensor as a copy of a parameter; None where its values are others, or it is the parameter by another name."""
    values, own = _values(tensor), _values(landmark.parameter)
    if values is None or own is None or values.data_ptr() == own.data_ptr():
        return None
    elements = _read([(tensor, landmark.positions)])[0]
    size = float(torch.linalg.vector_norm(weights - weights.mean()))
    if not float(torch.linalg.vector_norm(elements - weights)) < _CLOSE * size:
        return None
    return Copy(landmark, weakref.ref(tensor), elements, torch.finfo(values.dtype).eps)


def _is_same(copy: Copy, old: Copy, weights: dict[int, torch.Tensor]) -> bool:
    """Whether two copies are equal to one rounding of the weights."""
    size = float(torch.linalg.vector_norm(weights[id(old.landmark)]))
    return copy.landmark is old.landmark and bool(
        torch.linalg.vector_norm(copy.values - old.values) <= copy.unit * size
    )


@torch.no_grad()
def _read(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the chosen elements of every tensor as float64 on the CPU; of one device and type in one transfer."""
    parts = []
    for tensor, chosen in pairs:
        values = plain(tensor)
        assert values is not None
        parts.append(values.reshape(-1)[chosen.to(values.device)])
    if len({(part.device, part.dtype) for part in parts}) == 1:
        return list(torch.cat(parts).to("cpu", torch.float64).split([len(part) for part in parts]))
    return [part.to("cpu", torch.float64) for part in parts]


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
