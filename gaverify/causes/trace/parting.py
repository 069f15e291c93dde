"""Where the traces of two batches part: a branch, or a loop that runs more often for one of them."""

from __future__ import annotations

from collections.abc import Callable

from gaverify.causes.trace.traces import DECISIONS, Trace, reached

_NEAR = 6  # operations before the traces part among which a decision is looked for


def decisions_before(trace: Trace, start: int) -> list[int]:
    """The numbers that Python code read out of tensors shortly before a step."""
    near = range(max(start - _NEAR, 0), min(start + 1, len(trace.steps)))
    return [i for i in near if trace.steps[i].name in DECISIONS]


def parted(full: Trace, part: Trace) -> int | None:
    """Where two traces stop to hold the same operations one after the other; None where they do not."""
    pairs = enumerate(zip(full.steps, part.steps, strict=False))
    first = next((i for i, (step, other) in pairs if step.signature != other.signature), None)
    if first is None and len(full.steps) != len(part.steps):
        return min(len(full.steps), len(part.steps)) - 1
    return first


def goes_another_way(one: Trace, other: Trace) -> bool:
    """Whether Python code read numbers, and the losses then depend on operations that only one of two traces ran.

    A loop that runs more often over more samples runs the same lines.
    """
    read = any(step.name in DECISIONS for step in (*one.steps, *other.steps))
    ran = [{trace.steps[index].signature for index in trace.live()} for trace in (one, other)]
    return read and ran[0] != ran[1]


def strays_behind(trace: Trace, index: int | None, stray: Callable[[int], bool]) -> set[int]:
    """The strays from which a step computes, back to the first steps that all traces have."""
    if index is None:
        return set()
    steps = reached([index], lambda step: trace.steps[step].inputs if step == index or stray(step) else ())
    return set(filter(stray, steps))
