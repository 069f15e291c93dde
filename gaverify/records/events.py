"""What a training script did, as frozen records of names and numbers: the only thing that the event rules read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal


class Ending(str, Enum):
    """How a recorded run came to its end; the values are what the events and JSON hold."""

    UPDATES = "updates"
    """Every update that was asked for has been recorded."""

    SCRIPT = "script"
    """The script ran to its end."""

    EXIT = "exit"
    """The script left with `sys.exit`."""

    ERROR = "error"
    """The script raised."""

    BY_HAND = "by hand"
    """The script moves its weights without an optimizer of torch's: the run is made again and told so."""


Kind = Literal[
    "forward",
    "backward",
    "zero_grad",
    "cleared",
    "step",
    "moved",
    "edited",
    "clip",
    "scheduler",
    "scaler",
    "average",
    "settings",
    "loaded",
    "end",
]


@dataclass(frozen=True)
class Event:
    """One call that matters to accumulation.

    kind         values
    forward      `rows` along the leading dimension, `model`
    backward     `touched`: optimizers whose gradients it changed; `targets`: valid targets of the losses before it;
                 `weight`: what the script multiplied its loss by, where only the calls are looked at; `counted`: what
                 it divided the loss by, up to a factor, where no targets were seen; `scales`: what it multiplied each
                 number by that the loss was made from, outermost first; `terms`: how many terms its loss is a sum of;
                 `term`: the line of the one that alone was differentiated; `framework`: the fields of a `FrameworkLoop`
    zero_grad    `cleared`: optimizers whose gradients it removed
    cleared      the same without a call: `.grad` was set to None or zero by hand
    step         `optimizer`, `inside`: whether a backward was running; `by_hand`: gradients changed since the last call
    moved        `optimizers`; `where`: parameters changed without a step, "between" calls, in a "forward" or "backward"
    edited       `optimizers`: gradients were changed by hand before a forward or backward pass; `factors`: what each
                 optimizer's were multiplied by, None where that is no one number
    clip         `active`: whether it changed a gradient; `call`
    scheduler    `scheduler`, `lr`
    scaler       `call`: unscale_, step or update; `skipped`: a step that was left out because of infinities
    average      `AveragedModel.update_parameters` was called
    settings     numbers of `optimizers` were set by hand: a learning rate, a decay
    loaded       `path`: a file that `torch.load` read: a checkpoint, if the weights are other ones afterwards
    end          `reason`: an `Ending`

    `update` is the number of the update that was being worked on, from 1. File and line are the script's.
    """

    kind: Kind
    update: int
    file: str | None = None
    line: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str | None, int | None]:
        """File and line."""
        return self.file, self.line

    @property
    def touched(self) -> tuple[int, ...]:
        """The optimizers that a backward changed gradients of."""
        return tuple(self.values.get("touched", ()))

    @property
    def cleared(self) -> tuple[int, ...]:
        """The optimizers whose gradients were removed."""
        return tuple(self.values.get("cleared", ()))


@dataclass(frozen=True)
class LostPasses:
    """Backward passes that no optimizer ever used, and the event that took them away (None: the script ended)."""

    window: int
    backwards: tuple[Event, ...]
    by: Event | None
    survivors: int


@dataclass(frozen=True)
class Stale:
    """A step that used gradients which an earlier step of the same optimizer had used already."""

    step: Event
    backwards: int


@dataclass(frozen=True)
class Ledger:
    """What became of every backward pass."""

    lost: tuple[LostPasses, ...]
    stale: tuple[Stale, ...]


@dataclass
class _State:
    pending: dict[int, list[int]] = field(default_factory=dict)
    consumed: dict[int, set[int]] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    taken: dict[int, Event | None] = field(default_factory=dict)
    backwards: list[Event] = field(default_factory=list)
    stale: list[Stale] = field(default_factory=list)


def ledger_of(events: Sequence[Event]) -> Ledger:
    """Follows every backward pass to the steps that used it.

    A backward that is cleared for one optimizer and used by another (a GAN's generator loss also reaches the
    discriminator's gradients) is not lost.
    """
    state = _State()
    for event in events:
        _take(state, event)
    lost = {at: by for at, by in state.taken.items() if at not in state.used}
    return Ledger(_lost_passes(state, lost), tuple(state.stale))


def _take(state: _State, event: Event) -> None:
    if event.kind == "backward":
        state.backwards.append(event)
        for optimizer in event.touched:
            state.pending.setdefault(optimizer, []).append(len(state.backwards) - 1)
    elif event.kind in ("zero_grad", "cleared"):
        _drop(state, [state.pending.pop(optimizer, []) for optimizer in event.cleared], event)
    elif event.kind == "scaler" and event.values.get("skipped"):
        state.used |= {at for pending in state.pending.values() for at in pending}
        state.pending.clear()
    elif event.kind == "step":
        _step(state, event)
    elif event.kind == "end" and event.values.get("reason") != Ending.UPDATES:
        _drop(state, state.pending.values(), None)


def _drop(state: _State, groups: Iterable[list[int]], by: Event | None) -> None:
    for pending in groups:
        for at in pending:
            state.taken.setdefault(at, by)


def _step(state: _State, event: Event) -> None:
    optimizer: Any = event.values["optimizer"]
    pending = set(state.pending.get(optimizer, []))
    consumed = state.consumed.setdefault(optimizer, set())
    used_twice = pending & consumed
    if used_twice:
        state.stale.append(Stale(event, len(used_twice)))
    consumed |= pending
    state.used |= pending


def _lost_passes(state: _State, lost: dict[int, Event | None]) -> tuple[LostPasses, ...]:
    groups: dict[int, list[int]] = {}
    for at in sorted(lost):
        groups.setdefault(state.backwards[at].update, []).append(at)
    result = []
    for window, members in groups.items():
        survivors = sum(event.update == window and at in state.used for at, event in enumerate(state.backwards))
        by = next((lost[at] for at in members if lost[at] is not None), None)
        result.append(LostPasses(window, tuple(state.backwards[at] for at in members), by, survivors))
    return tuple(result)
