"""Which steps of two runs belong together: the k-th step of an optimizer in one run and in the other.

Pure functions over frozen events; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gaverify.records.events import Event

StepKey = tuple[int, int]
"""An optimizer, in the order in which they were made, and the number of its step from 1."""

Round = tuple[StepKey, ...]
"""Steps that are compared together: those of one update, one for each optimizer that stepped in it."""


def keys_of(events: Sequence[Event]) -> list[tuple[StepKey, Event]]:
    """Returns every step with its key, in order."""
    counts: dict[int, int] = {}
    found = []
    for event in events:
        if event.kind == "step":
            optimizer = event.values["optimizer"]
            counts[optimizer] = counts.get(optimizer, 0) + 1
            found.append(((optimizer, counts[optimizer]), event))
    return found


def rounds_of(events: Sequence[Event]) -> tuple[Round, ...]:
    """Returns the steps of each update: those without a forward or backward pass between them."""
    groups: dict[int, list[StepKey]] = {}
    for key, event in keys_of(events):
        groups.setdefault(event.update, []).append(key)
    return tuple(tuple(sorted(keys)) for _, keys in sorted(groups.items()))


def common_rounds(full: Sequence[Event], accumulated: Sequence[Event]) -> tuple[Round, ...]:
    """Returns the rounds that both runs have, in the full-batch run's order.

    Where the runs group their steps otherwise (one steps both networks at the end of a window, the other steps the
    first before it differentiates the second) every step is a round of its own.
    """
    whole, part = rounds_of(full), rounds_of(accumulated)
    common = min(len(whole), len(part))
    if all(_alike(a, b) for a, b in zip(whole[:common], part[:common], strict=True)):
        return whole[:common]
    known = {key for key, _ in keys_of(accumulated)}
    return tuple((key,) for key, _ in keys_of(full) if key in known)


def numbered(rounds: Sequence[Round]) -> Mapping[StepKey, int]:
    """Returns the number of the round that each step is in, from 1."""
    return {key: at for at, round_ in enumerate(rounds, 1) for key in round_}


def _alike(a: Round, b: Round) -> bool:
    """Whether two updates belong together, although an optimizer may step in one of them only."""
    return a == b or (bool(set(a) & set(b)) and (set(a) <= set(b) or set(b) <= set(a)))
