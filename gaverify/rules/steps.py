"""Steps and clearings at the wrong place: GAV601 and GAV602."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from gaverify.records.audit import Calls, Record
from gaverify.records.comparison import Comparison
from gaverify.records.events import Backward, Event, Forward, Stale, WeightsMoved
from gaverify.records.experiment import WeightFit
from gaverify.records.findings import Evidence, Finding
from gaverify.records.windows import Window
from gaverify.rules.lost_passes import MissedBoundary, clearing_groups, find_skipped, missed_boundaries
from gaverify.rules.rule import (
    control_evidence,
    count_calls,
    finding_of,
    first_place,
    place_of,
    rule,
    word_passes,
    word_times,
    word_updates,
)

_RAMP = 3  # sizes of windows that make a ramp; two are a first window that is too short


@rule("GAV601")
def step_inside_window(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where a step comes too early, and one where parameters move without a step."""
    record, calls = comparison.record, comparison.calls
    early = early_windows(record)
    if early and is_ramp(calls):
        yield _finding_of_ramp(calls)
    elif early:
        yield _finding_of_early_step(record, early)
    moved = _find_moves(calls)
    if moved:
        yield _finding_of_moves(calls, moved)


def is_ramp(calls: Calls) -> bool:
    """Whether windows grow step by step and never shrink: accumulation that is warmed up on purpose."""
    counts = [window.backwards for window in calls.complete]
    # a loop with a wrong first window grows once: a ramp has at least three sizes
    grows = all(before <= after for before, after in pairwise(counts))
    return grows and len(set(counts)) >= _RAMP and counts[-1] <= (calls.steps or counts[-1])


def _finding_of_ramp(calls: Calls) -> Finding:
    first, last = calls.complete[0], calls.complete[-1]
    return finding_of(
        f"updates grow from {word_passes(first.backwards)} to {last.backwards}: accumulation is warmed up, which looks "
        "intended",
        count_calls(calls.complete),
        remedy="compare updates after the warm-up, or switch it off for the audit",
        severity="note",
        location=place_of(first.steps[0]),
        proven=False,
    )


def early_windows(record: Record) -> list[tuple[Window, int]]:
    """Returns the windows that were stepped too early, each with the backward passes that it should have had."""
    calls = record.calls
    steps = [step for window in calls.complete for step in window.steps]
    if not any(window.backwards for window in calls.windows) and all(step.by_hand for step in steps):
        return []  # `torch.func.grad` leaves no backward pass to be counted
    # clearings show where windows end even where nothing tells K
    shared = steps_before_clearing(calls)
    if shared:
        return shared
    # a step is not early that is not fed a micro-batch because the loop skips it
    skipping = {update.number for update in record.updates if update.never_fed or update.data.adds_nothing}
    if skipping:  # behind the last update nothing was recorded, so that nothing shows why it lacks samples
        skipping |= {update.number for update in record.updates[-1:] if update.data.is_part}
    expected_passes = [
        (window, calls.expected_passes(window)) for window in calls.complete if window.number not in skipping
    ]
    # a forward without a backward pass is a micro-batch that was skipped: the step waited for it
    fed = {window.number: window.backwards + len(window.dropped_positions) for window in calls.complete}
    early = [
        (window, wanted) for window, wanted in expected_passes if wanted is not None and fed[window.number] < wanted
    ]
    if early and is_meant(record, early):
        return _without_tails(calls, early)
    first, usual = calls.first, calls.usual(calls.first)
    if first is not None and calls.expected_passes(first) is None and first.backwards == 1 < usual:
        return [(first, usual)]
    return []


def steps_before_clearing(calls: Calls) -> list[tuple[Window, int]]:
    """Returns the windows whose step is followed by more backward passes and steps before the gradients are cleared.

    Each comes with the backward passes up to the clearing: the script clears where its window ends and steps inside it.
    A clearing that is forgotten looks alike where nothing tells how long a window is meant to be: then there are none.
    """
    if any(len(group) > 1 for group in clearing_groups(calls.full_windows)):
        return []
    steps = []
    wanted = next(filter(None, map(calls.expected_passes, calls.complete)), None)
    for group in clearing_groups(calls.complete):
        total = sum(window.backwards for window in group)
        ones = wanted is None and all(window.backwards == 1 for window in group)
        if len(group) > 1 and (wanted == total or ones):
            steps += [(window, total) for window in group[:-1]]
    return steps


def is_meant(record: Record, early: list[tuple[Window, int]]) -> bool:
    """Whether K is what the script was to do: said so, shown by the other windows, or by the losses' own division.

    Else the arguments may ask for another batch size, and nothing is wrong with the loop.
    """
    calls = record.calls
    if calls.steps is not None or len({window.backwards for window in calls.complete}) > 1:
        return True
    if any(step.inside for window, _ in early for step in window.steps):
        return True
    # micro-batches that add up to the full batch's gradient were scaled for K of them
    undone = record.controls.steps_undone
    if undone is not None and abs(undone.factor - 1) < record.tolerance:
        return undone.residual < record.tolerance
    return any(wanted in calls.numbers for _, wanted in early)


def _without_tails(calls: Calls, early: list[tuple[Window, int]]) -> list[tuple[Window, int]]:
    """Leaves out short windows at the end of an epoch: the ones before them were whole."""
    first = calls.first
    # next to a full-batch run the passes that each window should have are known, so a short one is no tail
    if calls.full_windows or first is None or first.backwards < (calls.expected_passes(first) or 0):
        return early
    return [(window, wanted) for window, wanted in early if wanted == 1]


def _finding_of_early_step(record: Record, early: list[tuple[Window, int]]) -> Finding:
    window, wanted = early[0]
    step = window.steps[0] if window.steps else None
    inside = step is not None and step.inside
    undone = record.controls.steps_undone
    evidence = () if undone is None else (_with_steps_undone(record, undone),)
    other_updates = f" (and {word_updates(late.number for late, _ in early[1:])})" if len(early) > 1 else ""
    what = f"update {window.number} steps after {window.backwards} of {word_passes(wanted)}"
    if inside:
        what += ", inside the backward pass itself"
        remedy = "move the step out of the backward hook; a step in a hook cannot accumulate"
    else:
        remedy = (
            "step only after the last backward pass of the accumulation window: `if (i + 1) % K == 0:` with i from 0"
        )
    return finding_of(
        what + other_updates,
        count_calls(record.calls.complete),
        *evidence,
        remedy=remedy,
        location=place_of(step),
        proven=undone is not None and undone.residual < record.tolerance,
    )


def _with_steps_undone(record: Record, undone: WeightFit) -> Evidence:
    """Returns the evidence of the control in which all micro-batches run at the same weights."""
    text = f"with the weights put back after each step, a difference of {undone.residual:.1e} remains"
    if undone.residual < record.tolerance:
        summed = f"with the weights put back after each step, {word_passes(len(undone.weights))} sum to"
        is_one = abs(undone.factor - 1) < record.tolerance
        times_full = "the full batch's gradient" if is_one else f"{undone.factor:.4g} times the full batch's gradient"
        difference_left = max(undone.residual, undone.factor_residual)
        text = f"{summed} {times_full}, up to a relative difference of {difference_left:.0e}: proven"
        # Micro-batches of wrong shares have no one factor: then only the right weights give the full batch's gradient.
        if undone.factor_residual >= record.tolerance:
            text = (
                f"{summed} the full batch's gradient if each has the right loss weight, up to a "
                f"relative difference of {undone.residual:.0e}: proven"
            )
    return control_evidence("control", text, residual=undone.residual, factor=undone.factor)


def _find_moves(calls: Calls) -> list[tuple[Window, Event]]:
    """Parameters that change between backward passes without a step, in windows with more of it than the full batch's.

    A method may move weights on purpose (an average, a climb to where the loss is sharp): then it does so as often in
    the full-batch run.
    """
    meant = {window.number: len(_moves_in(window)) for window in calls.full_windows}
    moves = {window.number: _moves_in(window) for window in calls.windows}
    return [
        (window, event)
        for window in calls.windows
        if window.of(Backward) and len(moves[window.number]) > meant.get(window.number, 0)
        for event in moves[window.number]
    ]


def _moves_in(window: Window) -> list[Event]:
    return [event for event in window.before_last_backward if _by_hand(event)]


def _by_hand(event: Event) -> bool:
    return isinstance(event, WeightsMoved) and event.where == "between"


def _finding_of_moves(calls: Calls, moved: list[tuple[Window, Event]]) -> Finding:
    number = moved[0][0].number
    in_window = sum(moved_window.number == number for moved_window, _ in moved)
    numbers = sorted({moved_window.number for moved_window, _ in moved})
    in_full = sum(len(_moves_in(window)) for window in calls.full_windows if window.number == number)
    remedy = "change parameters (weight decay, clipping, averaging) once per update, next to the step"
    if in_full:
        remedy = (
            f"change them {word_times(in_full)} per update: add up the gradients of all micro-batches first, then run "
            "all of them again with the changed parameters"
        )
    return finding_of(
        f"the parameters change {word_times(in_window)} between the backward passes of update {number}, without a step"
        + (f"; in the full-batch run {word_times(in_full)}" if in_full else ""),
        count_calls(calls.complete),
        Evidence(
            "events",
            "weights",
            f"changed between two backward passes {word_times(len(moved))} in all",
            {"updates": numbers},
        ),
        remedy=remedy,
        location=first_place(event for _, event in moved),
        proven=True,
    )


@rule("GAV602")
def gradients_not_cleared(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where a step uses old gradients."""
    record, calls = comparison.record, comparison.calls
    joined = missed_boundaries(record)
    if joined:
        yield _finding_of_joined(calls, joined)
        return
    # steps inside a window use gradients twice as well, and GAV601 reports them
    inside = {number for window, _ in steps_before_clearing(calls) for number in (window.number, window.number + 1)}
    stale = [entry for entry in calls.ledger.stale if entry.step.update not in inside]
    if stale:
        yield _finding_of_stale(calls, stale)
        return
    for window, wanted in _overfull(record):
        yield finding_of(
            f"update {window.number} uses {word_passes(window.backwards)} instead of {wanted}: gradients left over "
            "from the previous update are still in `.grad`",
            count_calls(calls.complete),
            remedy="step or clear at the end of an epoch: `if (i + 1) % K == 0 or i + 1 == len(loader):`; also step if "
            "the last micro-batch is skipped",
            location=place_of(window.steps[0]),
            proven=True,
        )
        return


def _finding_of_stale(calls: Calls, stale: Sequence[Stale]) -> Finding:
    numbers = [entry.step.update for entry in stale]
    return finding_of(
        f"the step of update {numbers[0]} uses {word_passes(stale[0].backwards)} of earlier updates again",
        count_calls(calls.complete),
        Evidence(
            "events",
            "reused",
            f"{word_passes(sum(entry.backwards for entry in stale))}, in {word_updates(numbers)}",
            {"updates": numbers},
        ),
        remedy="call `optimizer.zero_grad()` once per update, after the step or before the first backward pass",
        location=place_of(stale[0].step),
        proven=True,
    )


def _finding_of_joined(calls: Calls, joined: list[MissedBoundary]) -> Finding:
    first, later = joined[0], [each.window.number for each in joined[1:]]
    other_updates = f" (and {word_updates(later)})" if later else ""
    if first.last is not None:
        count = len(first.window.of(Forward))
        fed = f"{count} micro-batches were given to the model instead of {first.steps}: two updates are joined"
        what = "the backward pass"
    else:
        fed = f"the samples of one of {first.steps} micro-batches are used in no update, "
        fed += "and this update uses some of the next"
        what = "the forward and the backward pass"
    return finding_of(
        f"update {first.window.number}{other_updates} continues past its last micro-batch, because that one is skipped "
        f"and the step with it: {word_passes(first.window.backwards)}",
        count_calls(calls.complete),
        Evidence("events", "fed", fed),
        remedy=f"skip {what} only, and not the step: no `continue` before `if (i + 1) % K == 0:`",
        location=place_of(first.last or first.window.steps[0]),
        proven=True,
    )


def _overfull(record: Record) -> list[tuple[Window, int]]:
    """Windows with more backward passes than K after a whole first one."""
    calls = record.calls
    first = calls.first
    if (
        first is None or first.backwards == 0 or first.dropped_positions
    ):  # a pass that the first window left out is no K
        return []
    update = record.update_of(first.number)
    if update is not None and find_skipped(record, update) is not None:  # nor is one that is not fed a micro-batch
        return []
    if any(window is first for window, _ in early_windows(record)):  # GAV601 says that it is short: no K
        return []
    wanted = calls.steps if calls.steps is not None else first.backwards
    lost = {loss.window for loss in calls.ledger.lost}
    full = {window.number: window.backwards for window in calls.full_windows}
    ordinary = full.get(first.number, 1)
    overfull = []
    for window in calls.complete:
        alike = window.optimizers == first.optimizers and full.get(window.number, ordinary) == ordinary
        if alike and window.number not in lost and window.backwards > wanted > 1 and first.backwards == wanted:
            overfull.append((window, wanted))
    return overfull
