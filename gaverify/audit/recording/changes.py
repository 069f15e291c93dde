"""Changes that no call announced: gradients cleared or changed, weights and settings set by hand; and their lines.

Some scripts move their weights themselves: the moved weights are the step of an optimizer that nobody announces. A
`ByHand` stands where one of torch's would. Between two looks at the weights the script has taken a step if they have
moved. What it used is its `.grad`; where it has none, what it has taken away from the weights stands for it: a rate, a
division and a clipping are in that, wherever the script does them, and a step that is the same whatever the gradient's
size (Adam, a sign) shows nothing of it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from gaverify.audit.recording.values import Sample, copied
from gaverify.audit.recording.watching import Seen, Watch
from gaverify.thresholds import FEW_UNITS, ONE_FACTOR
from gaverify.tracebacks import LineHunt, Owner, Place


@dataclass(eq=False)
class Copy:
    """A copy that the script has made of a model; `values` are its elements at the last look, shape (S,)."""

    model: weakref.ref[nn.Module]
    module: weakref.ref[nn.Module]
    sample: Sample | None = None
    values: torch.Tensor | None = None


class Averages:
    """Copies of the script's models (`copy.deepcopy`), which may be moved as averages of their weights.

    Averages in loose tensors are not seen: to find these, all objects of the process would have to be searched.

    Args:
        watch: The optimizers.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._copies: list[Copy] = []

    def add(self, model: nn.Module, module: nn.Module) -> None:
        """Notes a copy of a model."""
        if all(copy.module() is not module for copy in self._copies):
            self._copies.append(Copy(weakref.ref(model), weakref.ref(module)))

    def look(self, announced: nn.Module | None = None) -> list[dict[str, Any]]:
        """Returns the updates of averages since the last look, read as new = decay · old + (1 − decay) · weights.

        Each is what its event holds: the optimizers, and the decay with how far rounding may have moved it, where the
        decay can be told from rounding. `announced` is a copy that a call of torch's has updated.
        """
        if not self._copies:
            return []
        trained = {id(part): at for at in range(len(self._watch)) for part in self._watch.parameters(at)}
        found, copies, self._copies = [], self._copies, []
        for copy in copies:
            model, module = copy.model(), copy.module()
            if model is None or module is None or any(id(part) in trained for part in module.parameters()):
                continue
            self._copies.append(copy)
            optimizers = {trained[id(part)] for part in model.parameters() if id(part) in trained}
            told = _moved(copy, model, module, module is announced) if optimizers else None
            if told is not None:
                found.append({"optimizers": sorted(optimizers), **told})
        return found


def _moved(copy: Copy, model: nn.Module, module: nn.Module, announced: bool) -> dict[str, float] | None:
    """The decay and its slack, where they are known, of an update that moved a copy; None where none of an average did.

    Args:
        copy: The copy.
        model: What it was made of.
        module: Itself.
        announced: It was moved as an average.
    """
    own: list[torch.Tensor] = [*model.parameters()]
    parameters = list(module.parameters())
    if [part.shape for part in own] != [part.shape for part in parameters]:
        return None
    copy.sample = copy.sample or Sample(own)
    old, weights, new = copy.values, copy.sample.weights(), copy.sample.read(parameters)
    copy.values = new
    if old is None or torch.equal(new, old):
        return None
    unit = max(torch.finfo(part.dtype).eps for part in parameters if part.is_floating_point())
    allowed = FEW_UNITS * unit * float(torch.linalg.vector_norm(weights))
    apart, before = old - weights, float(torch.linalg.vector_norm(old - weights))
    if not before > allowed:  # any decay leaves it where it is
        return {} if float(torch.linalg.vector_norm(new - weights)) <= allowed else None
    decay, slack = float((new - weights) @ apart) / before**2, allowed / before
    exact = float(torch.linalg.vector_norm(new - weights - decay * apart)) <= allowed
    return {"decay": decay, "slack": slack} if announced or (exact and decay > slack) else None


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

    def __init__(self, watch: Watch, event: Callable[..., Any], averages: Averages, hunting: bool = False) -> None:
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

    def note_averages(self, announced: nn.Module | None = None) -> None:
        """Records updates of averages of the weights: one that a call has announced, or others without a line."""
        moves = self._averages.look(announced)
        for values in moves or [{}] * (announced is not None):
            self._event("average", None if announced is not None else (None, None), **values)

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
    """Counts how often weights moved after a differentiation without a step: by no optimizer of torch's.

    Where an optimizer holds them a window is over once its gradient is gone, too, and the weights are not put back:
    before the optimizer's first step others are moved inside a window (clamped), or there and back (SAM).
    """

    def __init__(self) -> None:
        self._samples: dict[int, tuple[nn.Module, Sample, list[torch.Tensor]]] = {}
        self._differentiated = False
        self._moved: list[Sample] = []  # of what an optimizer holds, since the last differentiation
        self.moves = self.windows = 0

    def differentiated(self) -> None:
        """A gradient will be computed: what moves the weights after it may be a step."""
        self._differentiated = True
        self.windows += bool(self._moved) and not any(bool(sample.gradients().any()) for sample in self._moved)
        self._moved.clear()

    def look(self, module: nn.Module, *, held: bool = False) -> None:
        """Looks at the weights of a module whose forward begins; an optimizer may hold some of them."""
        known = self._samples.setdefault(id(module), (module, Sample(list(module.parameters())), []))
        _, sample, seen = known
        now = sample.weights()
        if seen and torch.equal(now, seen[-1]):
            return
        if seen and self._differentiated:
            back = torch.equal(now, seen[0])
            self.moves += 1
            self._differentiated = False
            self._moved += [sample] * (held and not back)
            self.windows *= not back
        seen[:] = [*seen[-1:], now]
