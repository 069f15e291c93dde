"""What became of every backward pass: which update used it, which were lost, which were used twice.

Pure functions over frozen events; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gaverify.records.events import Ending, Event


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
    again = pending & consumed
    if again:
        state.stale.append(Stale(event, len(again)))
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
