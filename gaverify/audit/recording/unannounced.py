"""Changes that no call announces: gradients, weights and settings that a script changes by hand, and the lines.

A script that updates its weights by hand has no optimizer: `ByHand` stands for one. The script has made a step if its
weights have changed between two looks. It used its `.grad`. If it has none, the change of the weights stands for the
gradient. That contains a rate, a division and a clipping, wherever the script does them; it says nothing about the size
of a gradient if the update does not depend on the size (Adam, a sign).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from gaverify.audit.recording.storage import Journal
from gaverify.audit.recording.values import Sample, copy_values
from gaverify.audit.recording.watching import Look, Watch
from gaverify.passes.precision import unit_roundoff
from gaverify.records.events import ClearedByHand, GradientsEdited, SettingsChanged, WeightsMoved
from gaverify.thresholds import FEW_UNITS, ONE_FACTOR
from gaverify.tracebacks import LineHunt, Owner, Place

What = Literal["moved", "edited", "settings"]
"""A change by hand: of weights (or gradients that are cleared), of gradients, or of an optimizer's settings."""


class UnannouncedChanges:
    """Writes events for the changes that a look finds.

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
        """The line that changes the weights; None until it is known."""
        return self._places.get("moved")

    def note(self, look: Look, where: Literal["between", "forward", "backward"]) -> None:
        """Records cleared gradients, and changed weights of optimizers whose window is open.

        Args:
            look: What has changed.
            where: Between which calls, for the event.
        """
        self.end_hunt()
        moved = [index for index in look.moved if self._watch.of(index).pending]
        lost = [index for index in look.cleared if self._watch.of(index).pending]
        place = self._place_of("moved")
        if moved:
            self._journal.add(WeightsMoved(*self._journal.stamp(place), tuple(moved), where))
        if look.cleared:  # also gradients that a step has used: the next window starts without them
            self._watch.forget(look.cleared)
            stamp = self._journal.stamp(place if lost else (None, None))
            self._journal.add(ClearedByHand(*stamp, optimizers=tuple(look.cleared)))
        if (moved or lost) and where == "between":
            self._hunting.add("moved")  # the line is found in the next window

    def note_edits(self, look: Look) -> None:
        """Records gradients that were changed by hand between a backward pass and the next call."""
        changed = [index for index in look.changed if index not in look.cleared and self._watch.of(index).pending]
        if changed:
            factors = tuple(_factor(self._watch.of(index).gradients, look.changed[index]) for index in changed)
            self._journal.add(GradientsEdited(*self._journal.stamp(self._place_of("edited")), tuple(changed), factors))
            self._hunting.add("edited")

    def note_settings(self) -> None:
        """Records that settings of optimizers were changed by hand; the line is known from the second change on."""
        changed = self._watch.changed_settings(self._settings)
        if changed:
            stamp = self._journal.stamp(self._place_of("settings"))
            self._journal.add(SettingsChanged(*stamp, optimizers=tuple(changed)))
            self._hunting.add("settings")
        self.accept_settings()

    def accept_settings(self) -> None:
        """Remembers the settings as they are: a scheduler, or a step, has changed them."""
        self._settings = self._watch.settings()

    def has_changes(self) -> bool:
        """Whether a change that is hunted for has happened since the last look; remembers only which."""
        self._what = None
        if self._watch.changed_settings(self._settings):
            self._what = "settings"
        elif self._watch.differs():
            self._what = "moved"
        elif "edited" in self._hunting and self._watch.has_edits():
            self._what = "edited"
        return self._what is not None

    def hunt(self, changed: Callable[[Place], bool]) -> None:
        """Starts to look after every line if the line of an earlier change is not known.

        Args:
            changed: Calls `has_changes`.
        """
        if self._always:
            self._hunting = {"moved"}
        # Steps by hand are hunted although their line is known: the hunt keeps the gradients that each step uses.
        wanted = self._hunting if self._always else self._hunting - set(self._places)
        if wanted and sys.gettrace() is None:  # a debugger keeps its own trace function
            self._hunt = LineHunt(changed, Owner.USER)
            self._hunt.start(running=True)

    def end_hunt(self) -> None:
        """Stops to look after every line, and remembers the line that was found."""
        if self._hunt is not None:
            self._hunt.stop()
            if self._hunt.found is not None and self._what is not None:
                self._places.setdefault(self._what, self._hunt.found)
            self._hunt = None

    def _place_of(self, what: What) -> Place | tuple[None, None]:
        return self._places.get(what, (None, None))


def _factor(now: torch.Tensor, change: torch.Tensor) -> float | None:
    """Returns the factor that changed gradients; None if no one factor does. Shape (S,)."""
    before = now - change
    size = float(before @ before)
    factor = float(now @ before) / size if size else 0.0
    residual = float(torch.linalg.vector_norm(now - factor * before))
    return factor if residual <= ONE_FACTOR * float(torch.linalg.vector_norm(now)) else None


CERTAIN = 2
"""Changes of weights without an optimizer after which a script is taken to update them by hand."""


class ByHand:
    """Parameters that a script updates by hand, and their earlier values; has `param_groups`, as optimizers have.

    Args:
        parameters: Of one of its models, or of an optimizer whose step is undone.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self._before: list[torch.Tensor | None] = []
        self._older: list[torch.Tensor | None] | None = None  # before the last call of `take_change`
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Remembers the weights as they are."""
        self._before = [copy_values(parameter) for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def take_change(self) -> list[torch.Tensor | None]:
        """Returns the change of every parameter since then, old less new, and remembers the weights as they are."""
        before = self._older = self._before
        self.take()
        return [
            None if old is None or new is None or old.shape != new.shape else old - new
            for old, new in zip(before, self._before, strict=True)
        ]

    @torch.no_grad()
    def undo(self) -> None:
        """Restores the weights from before the last `take_change`, or as they were remembered."""
        self._before = self._before if self._older is None else self._older
        for parameter, old in zip(self.param_groups[0]["params"], self._before, strict=True):
            if old is not None:
                parameter.data.copy_(old)


@dataclass(frozen=True)
class Waiting:
    """A call of `autograd.grad` for parameters, which is a backward pass if a step uses its gradients."""

    place: Place | None
    """The user's line."""
    reached: list[int]
    """Numbers of the forwards that it reached."""
    targets: tuple[tuple[int, int], ...]
    """Of each loss: targets that count, and all."""
    changes: dict[int, torch.Tensor]
    """Gradients at the sampled elements, by optimizer."""


def _is_put_back(before: torch.Tensor, after: torch.Tensor, sample: Sample) -> bool:
    """Whether weights are as they were, up to the rounding of adding a direction and subtracting it again."""
    roundoff = max((unit_roundoff(each.dtype) for each in sample.parameters if each.is_floating_point()), default=0.0)
    allowed = FEW_UNITS * roundoff * torch.maximum(before.abs(), after.abs()).max()
    return bool(((after - before).abs() <= allowed).all())


class UnannouncedSteps:
    """Counts changes of weights after a differentiation that no optimizer of torch's has made.

    If an optimizer holds the weights, a change is an update only if the gradient is gone as well and the weights stay:
    before the optimizer's first step a script may clamp weights inside a window, or move them there and back (SAM).
    """

    def __init__(self) -> None:
        self._samples: dict[int, tuple[nn.Module, Sample, list[torch.Tensor]]] = {}
        self._differentiated = False
        self._moved: list[Sample] = []  # of weights that an optimizer holds, since the last differentiation
        self.moves = self.windows = 0  # changes, and those that are updates although an optimizer holds the weights

    def note_differentiation(self) -> None:
        """A gradient will be computed: a change of the weights after it may be a step."""
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
            is_put_back = _is_put_back(weights_seen[0], now, sample)
            self.moves += 1
            self._differentiated = False
            self._moved += [sample] * (has_optimizer and not is_put_back)
            self.windows *= not is_put_back  # SAM: what looked like updates before was the way there
        # Two looks are kept: weights that go there and back are those of the last look but one.
        weights_seen[:] = [*weights_seen[-1:], now]
