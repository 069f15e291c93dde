"""Changes that no call announced: gradients cleared or changed, weights and settings set by hand; and their lines.

Some scripts move their weights themselves: the moved weights are the step of an optimizer that nobody announces. A
`ByHand` stands where one of torch's would. Between two looks at the weights the script has taken a step if they have
moved. What it used is its `.grad`; where it has none, what it has taken away from the weights stands for it: a rate, a
division and a clipping are in that, wherever the script does them, and a step that is the same whatever the gradient's
size (Adam, a sign) shows nothing of it.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from gaverify.audit.recording.values import TOTAL, Sample, copied, plain, positions, read
from gaverify.audit.recording.watching import Seen, Watch
from gaverify.passes.walks import reached
from gaverify.thresholds import CLOSE_COPY, FEW_UNITS, ONE_FACTOR
from gaverify.tracebacks import LineHunt, Owner, Place

_READ = 128  # elements of a large parameter
_LANDMARKS = 6  # parameters of each optimizer whose copies are looked for
SEARCHES = 40  # searches through all objects in a run: each takes some hundredths of a second
_FIRST = 3  # of them while no copy has been found
_FEWEST = 3  # elements of a parameter: a decay fits any two values


class Move(NamedTuple):
    """An update of averages between two looks, read as new = decay · old + (1 − decay) · weights.

    `slack` is how far rounding may have moved the decay; infinite where the decay cannot be told from rounding.
    """

    optimizers: frozenset[int]
    decay: float
    slack: float

    def values(self) -> dict[str, Any]:
        """Returns what its event holds."""
        known = {"decay": self.decay, "slack": self.slack} if self.slack < float("inf") else {}
        return {"optimizers": sorted(self.optimizers), **known}


@dataclass(eq=False)
class Landmark:
    """A trained parameter whose copies are looked for, and the positions of its elements that are read."""

    optimizer: int
    parameter: torch.Tensor
    positions: torch.Tensor


@dataclass(eq=False)
class Copy:
    """A tensor that began close to a parameter; `values` are its elements at the last look, shape (S,)."""

    landmark: Landmark
    tensor: weakref.ref[torch.Tensor]
    values: torch.Tensor
    unit: float  # the distance from 1 to the next number in its format


class Followers:
    """Copies of a script's weights, and what has become of them since the last look.

    Args:
        watch: The optimizers.
        on: Whether this run looks for copies at all.
    """

    def __init__(self, watch: Watch, on: bool = True) -> None:
        self._watch, self._on = watch, on
        self._landmarks: list[Landmark] = []
        self._copies: list[Copy] = []
        self._searches = 0

    def search(self, most: int = _FIRST) -> None:
        """Looks for copies of the weights, a few times at most, where none is known yet."""
        if self._on and not self._copies and self._searches < most:
            self._copies = self._found()

    def look(self, *, announced: bool = False) -> list[Move]:
        """Returns the updates of averages since the last look; those of different decay are different ones.

        Args:
            announced: A call of torch's has updated one, whatever the copies have become.
        """
        if not self._copies:
            return []
        alive = [(copy, tensor) for copy in self._copies if (tensor := copy.tensor()) is not None]
        lost = [copy for copy in self._copies if copy.tensor() is None]
        now = read([(tensor, copy.landmark.positions) for copy, tensor in alive])
        self._copies = [replace(copy, values=values) for (copy, _), values in zip(alive, now, strict=True)]
        pairs = [([old], new) for (old, _), new in zip(alive, self._copies, strict=True)]
        if lost and self._searches < SEARCHES:
            found = self._found(lost)
            self._copies += found
            pairs += [([old for old in lost if old.landmark is new.landmark], new) for new in found]
        weights = self._weights()
        moves = [_moved(olds, new, weights[new.landmark], announced) for olds, new in pairs]
        together = _together([move for move in moves if move is not None])
        return sorted(together, key=lambda move: move.slack)[:1] if announced else together

    def _found(self, lost: Sequence[Copy] = ()) -> list[Copy]:
        """The copies of the weights among all tensors of the process that are not known yet."""
        self._searches += 1
        self._choose()
        known, weights = [*self._copies, *lost], self._weights()
        own = [*weights.values(), *(copy.values for copy in known), *(mark.parameter for mark in self._landmarks)]
        memory = {_memory(values) for tensor in own if (values := plain(tensor)) is not None}
        taken = {id(tensor) for tensor in [*self._watch.all_parameters(), *(copy.tensor() for copy in known)]}
        kinds = set(reached([torch.Tensor], type.__subclasses__))
        found = []
        for thing in gc.get_objects():
            values = values_of(thing) if type(thing) in kinds and id(thing) not in taken else None
            if values is None or thing.grad_fn is not None or _memory(values) in memory:
                continue
            for mark in self._landmarks:
                own_values = values_of(mark.parameter)
                if own_values is not None and own_values.shape == values.shape:
                    elements = read([(thing, mark.positions)])[0]
                    if _apart(elements, weights[mark]) < CLOSE_COPY * _apart(weights[mark], weights[mark].mean()):
                        found.append(Copy(mark, weakref.ref(thing), elements, torch.finfo(values.dtype).eps))
        return found

    def _choose(self) -> None:
        """Chooses the largest parameters of every optimizer."""
        known = {mark.optimizer for mark in self._landmarks}
        for index in set(range(len(self._watch))) - known:
            trained = (parameter for parameter in self._watch.parameters(index) if parameter.requires_grad)
            found = [(parameter, values) for parameter in trained if (values := values_of(parameter)) is not None]
            found.sort(key=lambda pair: -pair[1].numel())
            for at, (parameter, values) in enumerate(found[:_LANDMARKS]):
                chosen = positions(at, values.numel(), values.numel() * TOTAL // _READ).to(values.device)
                self._landmarks.append(Landmark(index, parameter, chosen))

    def _weights(self) -> dict[Landmark, torch.Tensor]:
        values = read([(mark.parameter, mark.positions) for mark in self._landmarks])
        return dict(zip(self._landmarks, values, strict=True))


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's numbers; None where they are too few, of no use, or gone: sharding frees what nobody needs."""
    values = plain(tensor)
    if values is None or values.layout is not torch.strided or not values.is_floating_point():
        return None
    gone = values.untyped_storage().nbytes() < values.element_size()
    return None if gone or values.numel() < _FEWEST else values


def _memory(values: torch.Tensor) -> int:
    return values.untyped_storage().data_ptr()


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b))


def _moved(olds: Sequence[Copy], new: Copy, weights: torch.Tensor, announced: bool) -> Move | None:
    """The update that made a copy of itself or of one that is gone, if it is one of an average.

    Args:
        olds: What it may have been before.
        new: The copy as it is.
        weights: The same elements of the parameter, shape (S,).
        announced: It is one of an average.
    """
    became = torch.equal(new.values, weights) and not announced
    if became or any(torch.equal(new.values, old.values) for old in olds):
        return None
    allowed = FEW_UNITS * new.unit * float(torch.linalg.vector_norm(weights))
    optimizer = frozenset([new.landmark.optimizer])
    for old in olds:
        apart, before = old.values - weights, _apart(old.values, weights)
        if not before > allowed:  # any decay leaves it where it is
            if _apart(new.values, weights) <= allowed:
                return Move(optimizer, 0.0, float("inf"))
            continue
        decay, slack = float((new.values - weights) @ apart) / before**2, allowed / before
        exact = _apart(new.values - weights, decay * apart) <= allowed
        if announced or (exact and decay > slack):
            return Move(optimizer, decay, slack)
    return None


def _together(moves: Sequence[Move]) -> list[Move]:
    """Returns the updates by decay: copies of one average moved alike; those that tell no decay are one of them."""
    groups: list[Move] = []
    for move in sorted(moves, key=lambda move: (move.slack == float("inf"), move.decay)):
        last = groups[-1] if groups else move
        if groups and move.decay - last.decay <= move.slack + last.slack:
            best = min(last, move, key=lambda each: each.slack)
            groups[-1] = best._replace(optimizers=last.optimizers | move.optimizers)
        else:
            groups.append(move)
    return groups


What = Literal["moved", "edited", "settings"]
"""What was done by hand: weights moved or gradients cleared, gradients or settings changed."""


class Changes:
    """Turns what a look found into events.

    Args:
        watch: The optimizers.
        event: Writes an event: kind, place, values.
        hunting: Look for the line in every window: no call tells when the weights move.
        averages: The averages of the weights.
    """

    def __init__(self, watch: Watch, event: Callable[..., Any], averages: Followers, hunting: bool = False) -> None:
        self._watch, self._event, self._averages = watch, event, averages
        self._hunt: LineHunt | None = None
        self._always = hunting
        self._hunting = set[What](["moved"] if hunting else [])
        self._what: What | None = None  # that was done by the line that the hunt has found
        self._places: dict[What, Place] = {}
        self._settings: dict[int, list[dict[str, float]]] = {}

    @property
    def found(self) -> Place | None:
        """The line that moves the weights, once it is known."""
        return self._places.get("moved")

    def note(self, seen: Seen, where: str) -> None:
        """Records cleared gradients, and moved weights of optimizers that have a window open."""
        self.settle()
        moved = [index for index in seen.moved if self._watch.of(index).pending]
        lost = [index for index in seen.cleared if self._watch.of(index).pending]
        place = self._place_of("moved")
        if moved:
            self._event("moved", place, where=where, optimizers=moved)
        if seen.cleared:  # also what a step has used: the next window starts without it
            self._watch.forget(seen.cleared)
            self._event("cleared", place if lost else (None, None), cleared=seen.cleared)
        if (moved or lost) and where == "between":
            self._hunting.add("moved")  # the next time round the line is found

    def note_edits(self, seen: Seen) -> None:
        """Records gradients that were changed by hand after a backward pass, and before the window goes on."""
        changed = [index for index in seen.changed if index not in seen.cleared and self._watch.of(index).pending]
        if changed:
            factors = [_factor(self._watch.of(index).gradients, seen.changed[index]) for index in changed]
            self._event("edited", self._place_of("edited"), optimizers=changed, factors=factors)
            self._hunting.add("edited")

    def note_averages(self, *, announced: bool = False) -> None:
        """Records updates of averages of the weights: one that a call has announced, or others without a line."""
        moves = [move.values() for move in self._averages.look(announced=announced)]
        for values in moves or [{}] * announced:
            self._event("average", None if announced else (None, None), **values)

    def note_settings(self) -> None:
        """Records that settings of optimizers were changed by hand; the line is known from the second time on."""
        changed = self._watch.changed_settings(self._settings)
        if changed:
            self._event("settings", self._place_of("settings"), optimizers=changed)
            self._hunting.add("settings")
        self.know_settings()

    def know_settings(self) -> None:
        """Takes the settings as they are: a scheduler, or a step, has changed them."""
        self._settings = self._watch.settings()

    def differ(self) -> bool:
        """Whether what is hunted for has happened since the last look; remembers only what it was."""
        self._what = None
        if self._watch.changed_settings(self._settings):
            self._what = "settings"
        elif self._watch.differs():
            self._what = "moved"
        elif "edited" in self._hunting and self._watch.edited():
            self._what = "edited"
        return self._what is not None

    def hunt(self, changed: Callable[[Place], bool]) -> None:
        """Starts to watch lines where a change without a known line was seen before; not while a debugger does.

        Args:
            changed: Calls `differ`.
        """
        if self._always:
            self._hunting = {"moved"}
        wanted = self._hunting if self._always else self._hunting - set(self._places)
        if wanted and sys.gettrace() is None:
            self._hunt = LineHunt(changed, Owner.USER)
            self._hunt.start(running=True)

    def settle(self) -> None:
        """Ends the watch and takes what it found."""
        if self._hunt is not None:
            self._hunt.stop()
            if self._hunt.found is not None and self._what is not None:
                self._places.setdefault(self._what, self._hunt.found)
            self._hunt = None

    def _place_of(self, what: What) -> Place | tuple[None, None]:
        return self._places.get(what, (None, None))


def _factor(now: torch.Tensor, change: torch.Tensor) -> float | None:
    """What gradients were multiplied by; None where no one number makes them what they are now. Shape (S,)."""
    before = now - change
    size = float(before @ before)
    factor = float(now @ before) / size if size else 0.0
    left = float(torch.linalg.vector_norm(now - factor * before))
    return factor if left <= ONE_FACTOR * float(torch.linalg.vector_norm(now)) else None


CERTAIN = 2
"""Moves of the weights after which a script is taken to move them itself, where no optimizer holds them."""


class ByHand:
    """Parameters that a script moves itself, and what they were before it did.

    Args:
        parameters: Those of one of its models, or of an optimizer whose step is to be undone.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self._before: list[torch.Tensor | None] = []
        self._older: list[torch.Tensor | None] | None = None  # before the last change that was asked for
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Keeps the weights as they are."""
        self._before = [copied(parameter) for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def change(self) -> list[torch.Tensor | None]:
        """Returns what was taken away from every parameter since, and keeps the weights as they are now."""
        before = self._older = self._before
        self.take()
        return [
            None if old is None or new is None or old.shape != new.shape else old - new
            for old, new in zip(before, self._before, strict=True)
        ]

    @torch.no_grad()
    def back(self) -> None:
        """Puts the weights back to what they were before the last change, or since they were taken."""
        self._before = self._before if self._older is None else self._older
        for parameter, old in zip(self.param_groups[0]["params"], self._before, strict=True):
            if old is not None:
                parameter.data.copy_(old)


@dataclass(frozen=True)
class Waiting:
    """A call of `autograd.grad` for parameters: what it gave each optimizer, at the sampled elements."""

    place: Place | None
    reached: list[int]
    targets: list[tuple[int, int]]
    changes: dict[int, torch.Tensor]


class Unannounced:
    """Counts how often weights moved after a differentiation without a step: by no optimizer of torch's."""

    def __init__(self) -> None:
        self._samples: dict[int, tuple[nn.Module, Sample, torch.Tensor]] = {}
        self._differentiated = False
        self.moves = 0

    def differentiated(self) -> None:
        """A gradient was computed: what moves the weights after it may be a step."""
        self._differentiated = True

    def look(self, module: nn.Module) -> None:
        """Looks at the weights of a module whose forward begins."""
        if id(module) not in self._samples:
            sample = Sample(list(module.parameters()))
            self._samples[id(module)] = (module, sample, sample.weights())
            return
        _, sample, before = self._samples[id(module)]
        now = sample.weights()
        if self._differentiated and not torch.equal(now, before):
            self.moves += 1
            self._differentiated = False
        self._samples[id(module)] = (module, sample, now)
