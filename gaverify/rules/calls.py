"""What is called for each micro-batch and belongs to the update: GAV606 to GAV608."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from gaverify.records.audit import Record
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import finding_of, measured, rule_of_loops
from gaverify.rules.wording import located, times, told_apart, weights_text
from gaverify.thresholds import FIT_FLOAT32, SAME_IN_FLOAT32


@rule_of_loops("GAV606")
def clip_per_micro_batch(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a fault where clipping inside a window changed gradients, a note where it did not."""
    inside = loop.inside("clip")
    if not inside:
        yield from _by_hand(loop)
        return
    active = [event for event in inside if event.values.get("active")]
    window = loop.window_of(inside[0].update)
    total = len(window.of("clip")) if window is not None else len(inside)
    did = f"{len(active)} of them changed it" if active else "none of them was active"
    yield finding_of(
        f"gradients are clipped {times(total)} in the window of update {inside[0].update}",
        measured(
            "events",
            f"{len(inside)} clippings of a half-summed gradient before the last backward pass; {did}",
            inside=len(inside),
            active=len(active),
        ),
        severity="fault" if active else "note",
        location=located([*active, *inside]),
        remedy="clip once per update, between the last backward pass and the step",
        proven=True,
    )


def _by_hand(loop: Record) -> Iterator[Finding]:
    """The same where the script does it itself: gradients shrink by a number of their own after each backward pass.

    One number that is the same every time is a division, which the weights of the micro-batches tell.
    """
    update = loop.divergent
    edits = [event for event in loop.inside("edited") if update is not None and event.update == update.number]
    factors = [factor for event in edits for factor in event.values["factors"]]
    if update is None or not edits or any(factor is not None and abs(factor) >= 1.0 for factor in factors):
        return
    if loop.together is not None and None in factors:
        return  # the gradient of several ranks, which the script reduces by hand, is no multiple of one rank's own
    usual = factors[0] if len(factors) > 1 else 1 / max(update.backwards, 1)
    if all(factor is not None and math.isclose(factor, usual, rel_tol=FIT_FLOAT32) for factor in factors):
        return
    known = [factor for factor in factors if factor is not None]
    by = f"multiplied by {weights_text(known, each=False)}" if len(known) == len(factors) else "cut element by element"
    yield finding_of(
        f"gradients are clipped by hand {times(len(edits))} inside the window of update {update.number}",
        measured("events", f"a half-summed gradient is {by} before the last backward pass", factors=known),
        location=located(edits),
        remedy="clip once per update, between the last backward pass and the step",
        proven=True,
    )


@rule_of_loops("GAV607")
def scheduler_per_micro_batch(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a finding where a scheduler steps inside a window."""
    inside = loop.inside("scheduler")
    if not inside:
        return
    number = inside[0].update
    window = loop.window_of(number)
    same = [
        event
        for event in (window.of("scheduler") if window else ())
        if event.values.get("scheduler") == inside[0].values.get("scheduler")
    ]
    yield finding_of(
        f"the learning-rate schedule steps {times(len(same))} in the window of update {number}",
        measured("events", _rates(loop, number, len(inside)), inside=len(inside), update=number),
        location=located(inside),
        remedy="step the scheduler once per update, after the optimizer's step",
        proven=True,
    )


def _rates(loop: Record, number: int, count: int) -> str:
    text = f"{count} scheduler steps before the last backward pass of their windows"
    update = next((update for update in loop.updates if update.number == number), None)
    pairs = zip(update.learning_rates, update.learning_rates_full, strict=False) if update is not None else ()
    if update is not None and any(not math.isclose(*pair, rel_tol=SAME_IN_FLOAT32) for pair in pairs):
        rates, full = told_apart(update.learning_rates, update.learning_rates_full)
        text += f"; learning rate of update {number}: {rates}, in the full-batch run {full}"
    return text


@rule_of_loops("GAV608")
def scaler_per_micro_batch(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a finding where a scaler is unscaled or updated inside a window."""
    inside = [event for event in loop.inside("scaler") if not event.values.get("skipped")]
    inside = [event for event in inside if event.values.get("call") in ("unscale_", "update")]
    if not inside:
        return
    number = inside[0].update
    calls = Counter(f"`{event.values['call']}`" for event in inside if event.update == number)
    text = " and ".join(f"{call} {times(count)}" for call, count in calls.items())
    yield finding_of(
        f"the gradient scaler works inside the window of update {number}: {text} before its last backward pass",
        measured(
            "events",
            f"{len(inside)} calls on a half-summed gradient in all recorded windows",
            inside=len(inside),
            update=number,
        ),
        location=located(inside),
        remedy="call `unscale_`, `step` and `update` once per update, after the last backward pass",
        proven=True,
    )
