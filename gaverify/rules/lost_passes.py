"""Backward passes that never reach an update (GAV603, GAV604), and micro-batches that get none."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gaverify.records.audit import Calls, Overwritten, Record, UpdateComparison
from gaverify.records.comparison import Comparison
from gaverify.records.events import Backward, Event, Forward, GradientsRemoved, LostPasses, Step
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.records.outcomes import Outcome
from gaverify.records.windows import Window
from gaverify.rules.rule import (
    control_evidence,
    count_calls,
    finding_of,
    first_place,
    join_texts,
    line_of,
    measured_evidence,
    place_of,
    rule,
    word_difference,
    word_difference_left,
    word_passes,
    word_updates,
)
from gaverify.thresholds import LOST_SHARE

# Micro-batches that a loop skips: they get no backward pass, or are not even fed to the model.


@dataclass(frozen=True)
class Skipped:
    """The micro-batches that a window leaves out although the full batch leaves out nothing.

    Args:
        window: The window.
        number: How many.
        count: How many micro-batches the window should have, with those.
        positions: Which, where the model was fed them.
        samples: How many samples they hold, where the model was not fed them.
    """

    window: Window
    number: int
    count: int
    positions: tuple[int, ...] = ()
    samples: int = 0

    @property
    def location(self) -> Location | None:
        """The forwards that no backward pass follows; else those that were made."""
        forwards = self.window.of(Forward)
        return first_place([forwards[at] for at in self.positions] or forwards)

    @property
    def subject(self) -> str:
        """The beginning of a sentence, with its verb."""
        number = self.window.number
        if not self.positions:
            return f"{self.samples} samples of update {number} have"
        which = f"{join_texts([str(at + 1) for at in self.positions], 6)} of update {number}"
        return f"micro-batches {which} have" if len(self.positions) > 1 else f"micro-batch {which} has"


def find_skipped(record: Record, update: UpdateComparison) -> Skipped | None:
    """Returns the micro-batches that an update leaves out; None where it leaves out none, or the full batch does."""
    calls = record.calls
    windows = (calls.full_windows, calls.windows)
    full_window, window = (next((w for w in each if w.number == update.number), None) for each in windows)
    # forwards without a backward in the full batch as well are part of the training (validation, a teacher)
    if full_window is None or window is None or full_window.dropped_positions:
        return None
    forwards = window.of(Forward)
    # a window without any backward pass is no accumulation at all
    if 0 < len(window.dropped_positions) < len(forwards):
        return Skipped(window, len(window.dropped_positions), len(forwards), window.dropped_positions)
    count = calls.expected_passes(window)
    missing = update.data.missing if update.data.adds_nothing else update.never_fed
    if not missing or count is None or not len(forwards) < count:
        return None
    return Skipped(window, count - len(forwards), count, samples=missing)


def explains_skipped(record: Record, update: UpdateComparison) -> bool:
    """Whether the micro-batches that an update leaves out are all that is wrong with its weights.

    Those that are left out have nothing to give, and the others are divided by the number of all.
    """
    skipped = find_skipped(record, update)
    if skipped is None or update.window.fit is None or update.window.fit.residual > record.tolerance:
        return False
    if math.isclose(update.norm_ratio, skipped.window.backwards / skipped.count, rel_tol=record.tolerance):
        return True
    # Weights of 1 / count become shares of targets, which add up to 1: the factors that repair them add up to count.
    factors = sum(update.window.fit.multipliers)
    return update.window.fit.determined and math.isclose(factors, skipped.count, rel_tol=record.tolerance)


@dataclass(frozen=True)
class MissedBoundary:
    """A window that goes on behind its K micro-batches, because the loop skips the last of them and the step with it.

    `last` is the forward of that one; None where the model was not fed it.
    """

    window: Window
    steps: int
    last: Event | None


def missed_boundaries(record: Record) -> list[MissedBoundary]:
    """Returns the windows that go on behind a last micro-batch that is skipped."""
    if any(window.dropped_positions for window in record.calls.full_windows):
        return []
    boundaries = []
    for window in record.calls.complete:
        forwards, update = window.of(Forward), record.update_of(window.number)
        steps = _micro_batches_of(record.calls, window)
        if steps is None or not 1 < steps < len(forwards):
            continue
        last = forwards[steps - 1] if steps - 1 in window.dropped_positions else None
        if update is None:  # calls alone: a validation that may be differentiated stands at another line
            places = {event.place for event in window.reached_forwards()}
            if last is not None and last.place in places:
                boundaries.append(MissedBoundary(window, steps, last))
        elif update.fed is not None and update.fed.accumulated > update.fed.full:
            # all of the full batch's samples and some of its next, or all but those that no update is fed
            if last is not None and update.fed.missing == 0:
                boundaries.append(MissedBoundary(window, steps, last))
            elif 0 < update.fed.missing == update.never_fed < update.fed.full:
                boundaries.append(MissedBoundary(window, steps, None))
    return boundaries


def _micro_batches_of(calls: Calls, window: Window) -> int | None:
    """K: as the user says, as the full batch's rows tell, or as most windows have; None where nothing shows it."""
    counts = Counter(len(each.of(Forward)) for each in calls.complete if each.optimizers == window.optimizers)
    if calls.steps is not None:
        return calls.steps
    full_window = next((full for full in calls.full_windows if full.number == window.number), None)
    if full_window is None:
        # of equally frequent numbers the smallest: windows that were joined are longer
        steps = max(counts, key=lambda count: (counts[count], -count))
        return steps if counts[steps] > 1 else None
    rows = list(accumulate(forward.rows or 0 for forward in window.of(Forward)))
    steps = rows.index(full_window.rows) + 1 if full_window.rows in rows else 0
    # else the arguments may ask for another batch size, and nothing is wrong with the loop
    return steps if steps in calls.numbers or steps in counts else None


def is_skipping(record: Record, update: UpdateComparison) -> bool:
    """Whether a micro-batch that is skipped is why an update holds other samples than the full batch's."""
    joined = any(each.window.number == update.number for each in missed_boundaries(record))
    return joined or find_skipped(record, update) is not None


# Backward passes that never reach an update: GAV603 and GAV604.


def cleared_inside(record: Record) -> list[LostPasses]:
    """Returns the losses that are no cut-off tail of an epoch, and that the full batch's run does not have itself."""
    calls = record.calls
    # a pass that is thrown away beside one that counts belongs to the training: it finds a direction
    ordinary = {loss.window for loss in calls.full_ledger.lost if loss.survivors}
    inside = [loss for loss in calls.ledger.lost if loss.by is not None and not _is_tail(calls, loss)]
    # an update that both runs skip (a loss that is not finite) is part of the training
    unlike = [loss for loss in inside if loss.window not in ordinary | calls.skipped_alike]
    return [loss for loss in unlike if not _summed_elsewhere(record, loss)]


def clearing_groups(windows: Sequence[Window]) -> list[list[Window]]:
    """Returns the complete windows between one clearing of an optimizer's gradients and the next.

    Windows that no clearing ends are left out: nothing tells where it would be.
    """
    groups: list[list[Window]] = []
    for optimizers in dict.fromkeys(window.optimizers for window in windows if window.complete):
        group: list[Window] = []
        for window in windows:
            if window.complete and window.optimizers != optimizers:
                continue
            # a clearing may stand at the start of a window or at its end: both end the group
            before, after = _clearings(window, set(optimizers))
            if before and group:
                groups.append(group)
                group = []
            if window.complete:
                group.append(window)
            if after and group:
                groups.append(group)
                group = []
    return groups


def _clearings(window: Window, optimizers: set[int]) -> tuple[bool, bool]:
    """Whether gradients of some optimizers are cleared before a window's first backward pass, and after its last."""
    places = [at for at, event in enumerate(window.events) if isinstance(event, Backward)]
    cleared = [
        at
        for at, event in enumerate(window.events)
        if isinstance(event, GradientsRemoved) and not optimizers.isdisjoint(event.optimizers)
    ]
    # a window without a backward pass has no last one: its clearing comes before what follows
    if not places:
        return bool(cleared), False
    return any(at < places[0] for at in cleared), any(at > places[-1] for at in cleared)


def cut_off(record: Record) -> list[LostPasses]:
    """Returns the losses at the end of an epoch or of the script."""
    calls = record.calls
    # what the full batch's run loses as well stands beside the training: a backward pass to count operations, say
    full_lost = {(loss.window, len(loss.backwards)) for loss in calls.full_ledger.lost}
    tails = [
        loss
        for loss in calls.ledger.lost
        if loss.window not in calls.skipped_alike
        and _is_tail(calls, loss)
        and (loss.window, len(loss.backwards)) not in full_lost
    ]
    # with survivors some passes were used and the rest is lost, whatever the script sums elsewhere
    return [loss for loss in tails if loss.survivors > 0 or not _summed_elsewhere(record, loss)]


def _is_tail(calls: Calls, loss: LostPasses) -> bool:
    """Whether what was lost is a whole group of micro-batches that a full window, or nothing, followed."""
    if loss.by is None or (loss.survivors == 0 and not cleared_before_step(calls, loss)):
        return True
    lost = {lost_pass.window for lost_pass in calls.ledger.lost}
    pass_counts = Counter(window.backwards for window in calls.complete if window.number not in lost)
    if calls.steps is not None:
        # K as the user gave it outvotes what the windows show
        pass_counts[calls.steps] += len(calls.windows) + 1
    wanted = pass_counts.most_common(1)[0][0] if pass_counts else calls.expected_passes(calls.window_of(loss.window))
    return wanted is not None and loss.survivors >= wanted


def cleared_before_step(calls: Calls, loss: LostPasses) -> bool:
    """Whether a step follows the clearing with no backward pass between them: it is given no gradient at all."""
    window = calls.window_of(loss.window)
    if window is None or loss.by is None or loss.survivors:
        return False
    # a clearing before the last backward pass lost some passes only; after it, it loses all of them
    last = max((at for at, event in enumerate(window.events) if isinstance(event, Backward)), default=-1)
    after = [event for event in window.events[last + 1 :] if isinstance(event, Step) or event is loss.by]
    return loss.by in after and any(isinstance(event, Step) for event in after[after.index(loss.by) :])


def _summed_elsewhere(record: Record, loss: LostPasses) -> bool:
    """Whether what was cleared still reached the step, through a buffer in which the script sums gradients itself."""
    window, update = record.calls.window_of(loss.window), record.update_of(loss.window)
    if window is None:
        return False
    if update is None:  # calls alone: a gradient that was put in place by hand may hold anything
        return any(step.by_hand for step in window.steps)
    if update.judged and update.outcome is Outcome.EQUIVALENT:
        return True
    backwards, fit = window.of(Backward), update.window.fit
    if fit is None or fit.used_residual > record.tolerance or len(fit.used) != len(backwards):
        # a script that puts gradients in place may have transformed what each pass gave: nothing shows which are lost
        return any(step.by_hand for step in window.steps)
    largest = max(map(abs, fit.used))
    lost = [weight for weight, event in zip(fit.used, backwards, strict=True) if event in loss.backwards]
    # a fit gives lost passes a weight of about zero, never exactly zero
    return all(abs(weight) > LOST_SHARE * largest for weight in lost)


@rule("GAV603")
def gradients_cleared_inside_window(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where gradients vanish inside a window."""
    yield from _by_the_forward(comparison)
    record = comparison.record
    setting, update = record.controls.overwritten, record.divergent
    if setting is not None and update is not None:
        yield _finding_of_overwritten(update, setting)
        return
    losses = cleared_inside(record)
    if not losses:
        return
    first = losses[0]
    numbers = [loss.window for loss in losses]
    summary = (
        f"update {first.window} uses {first.survivors} of {word_passes(len(first.backwards) + first.survivors)}: the "
        "gradients of the others were cleared"
    )
    remedy = "clear the gradients once per update, after the step"
    if cleared_before_step(record.calls, first):
        summary = f"update {first.window} steps without a gradient: it was cleared just before the step"
        remedy += ", never before it"
    yield finding_of(
        summary,
        count_calls(record.calls.windows),
        Evidence("events", "cleared", f"gradients lost in {word_updates(numbers)}", {"updates": numbers}),
        remedy=remedy,
        location=place_of(first.by),
        proven=True,
    )


def _finding_of_overwritten(update: UpdateComparison, setting: Overwritten) -> Finding:
    """Returns the finding where each backward pass writes its gradients over those of the passes before it."""
    return finding_of(
        f"update {update.number} uses 1 of {word_passes(update.window.steps)}: each overwrites the gradients instead "
        "of adding to them",
        measured_evidence("comparison", word_difference(update), update=update.number),
        control_evidence(
            "control",
            "with the gradients cleared before every backward pass, the step gets the same gradient to "
            f"{setting.difference_left:.0e}: proven",
            left=setting.difference_left,
        ),
        remedy="add to the existing gradients (`g if main.grad is None else main.grad + g`), and clear them once "
        "per update, after the step",
        location=line_of(setting.file, setting.line),
        proven=True,
    )


def _by_the_forward(comparison: Comparison) -> Iterator[Finding]:
    """A finding where the model or the loss clears the gradients of earlier micro-batches: `zero_grad` inside them."""
    run = comparison.backward.kept
    if run is None:
        return
    by = comparison.backward.clearing
    line = f"; cleared by {by}: `{by.source}`" if by is not None and by.source else ""
    yield finding_of(
        "the forward clears the gradients of earlier micro-batches",
        measured_evidence("gradients", f"{comparison.compared.largest}{line}"),
        control_evidence("gradients", word_difference_left(run), left=run.left),
        remedy="clear the gradients once per update, after the step"
        + ("" if by is not None else "; look for `zero_grad` in the loss and in hooks"),
        location=by.location if by is not None else None,
        proven=run.rounding,
    )


@rule("GAV604")
def trailing_window_lost(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where the last backward passes of an epoch or of the script are thrown away."""
    record = comparison.record
    tails = cut_off(record)
    if not tails:
        return
    first = tails[0]
    after = f"after update {first.window - 1}" if first.window > 1 else "before the first update"
    how = "are cleared before a step uses them" if first.by is not None else "are never used: the script ends"
    yield finding_of(
        f"{word_passes(len(first.backwards))} {after} {how}",
        count_calls(record.calls.windows),
        remedy="also step after the last micro-batch of an epoch, and divide by the number of micro-batches in that "
        "update",
        location=first_place(filter(None, (first.by, first.backwards[-1]))),
        proven=True,
    )
