"""What is called for each micro-batch and belongs to the update: GAV606 to GAV608."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.events import Event
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding
from gaverify.records.stages import Stage, StageComparison
from gaverify.rules.rule import controlled, finding_of, measured, rule_of_loops
from gaverify.rules.wording import difference, located, times, told_apart, weights_text
from gaverify.thresholds import FIT_FLOAT32, SAME_IN_FLOAT32


@rule_of_loops("GAV606")
def clip_per_micro_batch(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a fault where clipping inside a window changed gradients, a note where it did not.

    A control whose losses are too small to be clipped shows whether that is all.
    """
    update, inside = loop.divergent, loop.inside("clip")
    if any(event.values.get("active") for event in inside):
        yield _clipped(loop, inside)
    elif update is not None and (edits := _edits(loop, update)):
        yield _clipped_by_hand(loop, update, edits)
    elif update is not None and loop.together is None and any(map(_agrees_unclipped, update.stages)):
        yield _clipped_too_early(loop, update)
    elif inside:
        yield _clipped(loop, inside)


def clipped_inside(facts: Facts) -> bool:
    """Whether a difference may come of clipping inside a window."""
    return (
        facts.loop is not None
        and facts.loop.divergent is not None
        and any(finding.severity == "fault" for finding in clip_per_micro_batch.judge(facts))
    )


def _clipped(loop: Record, inside: Sequence[Event]) -> Finding:
    number = inside[0].update
    here = [event for event in inside if event.update == number]
    active = [event for event in inside if event.values.get("active")]
    window = loop.window_of(number)
    total = len(window.of("clip")) if window is not None else len(here)
    did = f"{len(active)} of {len(inside)} in all windows changed it" if active else "none of them was active"
    control, proven = _without_clips(loop)
    return finding_of(
        f"gradients are clipped {times(total)} in the window of update {number}",
        measured(
            "events",
            f"{len(here)} clippings of a half-summed gradient before its last backward pass; {did}",
            inside=len(inside),
            active=len(active),
        ),
        *control,
        severity="fault" if active else "note",
        location=located([*active, *inside]),
        remedy="clip once per update, between the last backward pass and the step",
        proven=proven or not active,
    )


def _agrees_unclipped(stage: StageComparison) -> bool:
    return stage.stage is Stage.UNCLIPPED and stage.outcome is Outcome.EQUIVALENT


def _clipped_too_early(loop: Record, update: UpdateComparison) -> Finding:
    """The same where a script clips, and makes of the clipped gradients only then what its step uses."""
    window = loop.window_of(update.number)
    control, proven = _without_clips(loop)
    return finding_of(
        f"gradients are clipped in update {update.number} before the script has divided them, or added them up",
        measured("comparison", difference(update), update=update.number),
        *control,
        location=located([] if window is None else [*window.of("clip"), *reversed(window.of("backward"))]),
        remedy="finish the gradient first (divide the losses by K), then clip it: the limit is for what the step uses",
        proven=proven,
    )


def _without_clips(loop: Record) -> tuple[tuple[Evidence, ...], bool]:
    """What the control without clipping left, and whether clipping is proven by it; calls alone show what they do."""
    update = loop.divergent
    small = next((each for each in loop.unclipped if update is not None and each.number == update.number), None)
    if small is None:
        return (), update is None
    proven = small.outcome is Outcome.EQUIVALENT
    fitted = small.fit is not None and small.fit.residual <= loop.tolerance
    text = f"with losses too small to be clipped the difference is {small.relative_difference:.0e}"
    told = "proven" if proven else "weights explain the rest" if fitted else "another cause is left"
    return (controlled("control", f"{text}: {told}", left=small.relative_difference),), proven or fitted


def _edits(loop: Record, update: UpdateComparison) -> list[Event]:
    """Where gradients shrink by hand, by a number of their own after each backward pass.

    One number that is the same every time is a division, which the weights of the micro-batches tell.
    """
    edits = [event for event in loop.inside("edited") if event.update == update.number]
    factors = [factor for event in edits for factor in event.values["factors"]]
    if not edits or any(factor is not None and abs(factor) >= 1.0 for factor in factors):
        return []
    if loop.together is not None and None in factors:
        return []  # the gradient of several ranks, which the script reduces by hand, is no multiple of one rank's own
    usual = factors[0] if len(factors) > 1 else 1 / max(update.backwards, 1)
    same = all(factor is not None and math.isclose(factor, usual, rel_tol=FIT_FLOAT32) for factor in factors)
    return [] if same else edits


def _clipped_by_hand(loop: Record, update: UpdateComparison, edits: Sequence[Event]) -> Finding:
    factors = [factor for event in edits for factor in event.values["factors"]]
    known = [factor for factor in factors if factor is not None]
    by = f"multiplied by {weights_text(known, each=False)}" if len(known) == len(factors) else "cut element by element"
    control, proven = _without_clips(loop)
    return finding_of(
        f"gradients are clipped by hand {times(len(edits))} inside the window of update {update.number}",
        measured("events", f"a half-summed gradient is {by} before the last backward pass", factors=known),
        *control,
        location=located(edits),
        remedy="clip once per update, between the last backward pass and the step",
        proven=proven,
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
