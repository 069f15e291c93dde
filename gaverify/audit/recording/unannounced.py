"""Changes that no call announced: gradients cleared or changed, weights and settings set by hand; and their lines.

Some scripts move their weights themselves: the moved weights are the step of an optimizer that nobody announces. A
`ByHand` stands where one of torch's would. Between two looks at the weights the script has taken a step if they have
moved. What it used is its `.grad`; where it has none, what it has taken away from the weights stands for it: a rate, a
division and a clipping are in that, wherever the script does them, and a step that is the same whatever the gradient's
size (Adam, a sign) shows nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from gaverify.audit.recording.journal import Journal
from gaverify.audit.recording.values import Sample, copy_values
from gaverify.audit.recording.watching import Look, Watch
from gaverify.passes.precision import unit_roundoff
from gaverify.records.events import ClearedByHand, GradientsEdited, SettingsChanged, WeightsMoved
from gaverify.thresholds import FEW_UNITS, ONE_FACTOR
from gaverify.tracebacks import LineHunt, Owner, Place

What = Literal["moved", "edited", "settings"]
"""What was done by hand: weights moved or gradients cleared, gradients or settings changed."""


class UnannouncedChanges:
    """Turns what a look found into events.

    Args:
        watch: The optimizers.
        journal: Where the events are written.
    """

    def __init__(self, watch: Watch, journal: Journal) -> None:
        self._watch, self._journal = watch, journal
        self._hunt: LineHunt | None = None
        self._always = False
        self._hunting = set[What]()
        self._what: What | None = None  # that was done by the line that the hunt has found
        self._places: dict[What, Place] = {}
        self._settings: dict[int, list[dict[str, float]]] = {}

    def hunt_always(self) -> None:
        """Looks in every window for the line that moves the weights: no call tells of it."""
        self._always, self._hunting = True, {"moved"}

    @property
    def moving_line(self) -> Place | None:
        """The line that moves the weights, once it is known."""
        return self._places.get("moved")

    def note(self, look: Look, where: Literal["between", "forward", "backward"]) -> None:
        """Records cleared gradients, and moved weights of optimizers that have a window open."""
        self.settle()
        moved = [index for index in look.moved if self._watch.of(index).pending]
        lost = [index for index in look.cleared if self._watch.of(index).pending]
        place = self._place_of("moved")
        if moved:
            self._journal.add(WeightsMoved(*self._journal.stamp(place), tuple(moved), where))
        if look.cleared:  # also what a step has used: the next window starts without it
            self._watch.forget(look.cleared)
            stamp = self._journal.stamp(place if lost else (None, None))
            self._journal.add(ClearedByHand(*stamp, optimizers=tuple(look.cleared)))
        if (moved or lost) and where == "between":
            self._hunting.add("moved")  # the next time round the line is found

    def note_edits(self, look: Look) -> None:
        """Records gradients that were changed by hand after a backward pass, and before the window goes on."""
        changed = [index for index in look.changed if index not in look.cleared and self._watch.of(index).pending]
        if changed:
            factors = tuple(_factor(self._watch.of(index).gradients, look.changed[index]) for index in changed)
            self._journal.add(GradientsEdited(*self._journal.stamp(self._place_of("edited")), tuple(changed), factors))
            self._hunting.add("edited")

    def note_settings(self) -> None:
        """Records that settings of optimizers were changed by hand; the line is known from the second time on."""
        changed = self._watch.changed_settings(self._settings)
        if changed:
            stamp = self._journal.stamp(self._place_of("settings"))
            self._journal.add(SettingsChanged(*stamp, optimizers=tuple(changed)))
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
        elif "edited" in self._hunting and self._watch.has_edits():
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
    residual = float(torch.linalg.vector_norm(now - factor * before))
    return factor if residual <= ONE_FACTOR * float(torch.linalg.vector_norm(now)) else None


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
        self._before = [copy_values(parameter) for parameter in self.param_groups[0]["params"]]

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


def _is_put_back(before: torch.Tensor, after: torch.Tensor, sample: Sample) -> bool:
    """Whether weights are where they were: adding a direction and taking it off again leaves roundings behind."""
    roundoff = max((unit_roundoff(each.dtype) for each in sample.parameters if each.is_floating_point()), default=0.0)
    allowed = FEW_UNITS * roundoff * torch.maximum(before.abs(), after.abs()).max()
    return bool(((after - before).abs() <= allowed).all())


class UnannouncedSteps:
    """Counts how often weights moved after a differentiation without a step: by no optimizer of torch's.

    Where an optimizer holds them a window is over once its gradient is gone, too, and the weights are not put back:
    before the optimizer's first step others are moved inside a window (clamped), or there and back (SAM).
    """

    def __init__(self) -> None:
        self._samples: dict[int, tuple[nn.Module, Sample, list[torch.Tensor]]] = {}
        self._differentiated = False
        self._moved: list[Sample] = []  # of what an optimizer holds, since the last differentiation
        self.moves = self.windows = 0

    def note_differentiation(self) -> None:
        """A gradient will be computed: what moves the weights after it may be a step."""
        self._differentiated = True
        self.windows += bool(self._moved) and not any(bool(sample.gradients().any()) for sample in self._moved)
        self._moved.clear()

    def look(self, module: nn.Module, *, has_optimizer: bool = False) -> None:
        """Looks at the weights of a module whose forward begins; an optimizer may hold some of them."""
        record = self._samples.setdefault(id(module), (module, Sample(list(module.parameters())), []))
        _, sample, weights_seen = record
        now = sample.weights()
        if weights_seen and torch.equal(now, weights_seen[-1]):
            return
        if weights_seen and self._differentiated:
            back = _is_put_back(weights_seen[0], now, sample)
            self.moves += 1
            self._differentiated = False
            self._moved += [sample] * (has_optimizer and not back)
            self.windows *= not back
        weights_seen[:] = [*weights_seen[-1:], now]
