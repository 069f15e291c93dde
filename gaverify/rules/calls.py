"""Calls and settings of a step: once per micro-batch, or with other numbers (GAV606 to GAV609)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from gaverify.records.audit import (
    Calls,
    Record,
    SettingDifference,
    Stage,
    TransformedGradients,
    UpdateComparison,
)
from gaverify.records.comparison import Comparison
from gaverify.records.events import (
    Backward,
    ClearedByHand,
    Clipping,
    Event,
    GradientsEdited,
    ScalerCall,
    SchedulerStep,
    SettingsChanged,
    Step,
)
from gaverify.records.experiment import FirstDifference
from gaverify.records.findings import Evidence, Finding
from gaverify.records.outcomes import Outcome
from gaverify.rules.rule import (
    control_evidence,
    finding_of,
    first_place,
    measured_evidence,
    place_of,
    quote_names,
    rule,
    show_distinct,
    trace_evidence,
    weights_text,
    word_control,
    word_difference,
    word_times,
)
from gaverify.thresholds import FIT_FLOAT32, SAME_IN_FLOAT32

_SMALLER = "with losses too small to be clipped, the difference"
_CLIP_ONCE = "clip once per update, between the last backward pass and the step"


@rule("GAV606")
def clip_per_micro_batch(comparison: Comparison) -> Iterator[Finding]:
    """Yields a fault where clipping inside a window changed gradients, a note where it did not.

    A control whose losses are too small to be clipped shows whether that is all.
    """
    record = comparison.record
    update, inside = record.divergent, record.calls.inside(Clipping)
    # the strongest evidence first: a proven transformation also explains clippings that were seen inside it
    if update is not None and record.edit is not None:
        yield _finding_of_late_edit(update, record.edit)
    elif update is not None and record.controls.transformed is not None:
        yield _finding_of_transformed(record.calls, update, record.controls.transformed)
    elif any(clipping.active for clipping in inside):
        yield _finding_of_clips(record, inside)
    elif update is not None and (edits := _edits(record, update)):
        yield _finding_of_edits(record, update, edits)
    # of several ranks, clipping before the reduction is GAV706
    elif (
        update is not None
        and record.together is None
        and any(stage.stage is Stage.UNCLIPPED and stage.outcome is Outcome.EQUIVALENT for stage in update.stages)
    ):
        yield _finding_of_early_clips(record, update)
    elif inside:
        yield _finding_of_clips(record, inside)


def clipped_inside(comparison: Comparison) -> bool:
    """Whether a difference may come of clipping inside a window."""
    return comparison.record.divergent is not None and any(
        finding.severity == "fault" for finding in clip_per_micro_batch.judge(comparison)
    )


def _finding_of_clips(record: Record, inside: Sequence[Clipping]) -> Finding:
    number = inside[0].update
    in_window = [event for event in inside if event.update == number]
    active = [clipping for clipping in inside if clipping.active]
    window = record.calls.window_of(number)
    # the window's own number includes the clipping after its last backward pass, which is right
    clippings = len(window.of(Clipping)) if window is not None else len(in_window)
    early = "" if clippings == len(in_window) else f"{len(in_window)} of them "
    effect = f"{len(active)} of {len(inside)} in all updates changed it" if active else "none of them was active"
    control, proven = _without_clips(record)
    return finding_of(
        f"gradients are clipped {word_times(clippings)} in update {number}, {early}before the last backward pass",
        measured_evidence(
            "events",
            f"{len(in_window)} clippings of a partly accumulated gradient; {effect}",
            inside=len(inside),
            active=len(active),
        ),
        *control,
        remedy=_CLIP_ONCE,
        # a clipping that changed nothing explains no difference, but may change the gradients of another batch
        severity="fault" if active else "note",
        location=first_place([*active, *inside]),
        proven=proven or not active,
        together=map(place_of, active or inside),
    )


def _finding_of_transformed(calls: Calls, update: UpdateComparison, control: TransformedGradients) -> Finding:
    """Gradients of which a script makes something else in each micro-batch: no weights stand for that."""
    window = calls.window_of(update.number)
    # a script that takes gradients out of `.grad` clears them there, next to the line that transforms them
    events = [] if window is None else [*window.of(ClearedByHand), *reversed(window.of(Backward))]
    # every parameter answers in its own way: the range is shown, in two digits so that equal answers show once
    responses = sorted({f"{response:.2g}" for response in control.responses}, key=float)
    between = responses[0] if len(responses) == 1 else f"{responses[0]} to {responses[-1]}"
    text = f"with every loss multiplied by -{control.times:g} the optimizer sees {between} times as much, "
    text += f"not {control.times:g}"
    alone = f"with half of the micro-batches at a time the changes add up to {control.halves_difference:.0e}: "
    meaning = "each micro-batch is transformed separately" + (": proven" if control.all_of_it else "")
    return finding_of(
        f"each micro-batch transforms the gradients of {quote_names(control.parameters)} before they are added up "
        f"(update {update.number})",
        measured_evidence(
            "comparison",
            f"{word_difference(update)}; the untransformed gradients add up to the full batch's, up to one factor, to "
            f"{control.sums_difference:.0e}",
            apart=control.sums_difference,
            parameters=list(control.parameters),
            update=update.number,
        ),
        control_evidence("control", text, times=control.times, responses=list(control.responses)),
        control_evidence("control", alone + meaning, left=control.halves_difference),
        remedy="add up the gradients of all micro-batches first, then transform the sum once, before the step",
        location=first_place(events),
        proven=control.all_of_it,
    )


def _finding_of_late_edit(update: UpdateComparison, first: FirstDifference) -> Finding:
    """Gradients that agree when the last backward pass ends, and are then changed by what differs."""
    summed = next(stage for stage in update.stages if stage.stage is Stage.SUMMED)
    agreement = f"the last backward pass leaves gradients that differ by {summed.relative_difference:.0e}; "
    control = first.control
    proven = control is not None and control.proves
    tried = (
        [] if control is None else [word_control("trace", f"with {control.what} the difference", control.left, proven)]
    )
    return finding_of(
        f"the gradients of update {update.number} agree after the last backward pass, and differ by what then changes "
        f"them: `{first.operation.source}`",
        measured_evidence("comparison", agreement + word_difference(update), update=update.number),
        trace_evidence(first),
        *tried,
        remedy="compute what changes the gradients from all micro-batches of the update, not from the last one alone",
        location=first.operation.location,
        proven=proven,
    )


def _finding_of_early_clips(record: Record, update: UpdateComparison) -> Finding:
    """The same where a script clips, and makes of the clipped gradients only then what its step uses."""
    window = record.calls.window_of(update.number)
    control, proven = _without_clips(record)
    # clipping by hand leaves no event: then the last backward pass is the nearest known line
    location = first_place([] if window is None else [*window.of(Clipping), *reversed(window.of(Backward))])
    return finding_of(
        f"gradients are clipped in update {update.number} before they are summed or divided",
        measured_evidence("comparison", word_difference(update), update=update.number),
        *control,
        remedy="complete the gradient first (divide the losses by K), then clip: the limit is meant for what the step "
        "uses",
        location=location,
        proven=proven,
    )


def _without_clips(record: Record) -> tuple[tuple[Evidence, ...], bool]:
    """Returns the evidence of the control without clipping, and whether it proves clipping; calls prove themselves."""
    update = record.divergent
    number = update.number if update is not None else None
    small = next((unclipped for unclipped in record.controls.unclipped if unclipped.number == number), None)
    if small is None:
        # calls alone show that clipping comes too early; a difference needs the control
        return (), update is None
    proven = small.outcome is Outcome.EQUIVALENT
    # wrong weights next to the clipping leave a difference in the control as well
    fitted = small.window.fit is not None and small.window.fit.residual <= record.tolerance
    meaning = ("weights explain the rest",) if fitted else ()
    return (word_control("control", _SMALLER, small.relative_difference, proven, *meaning),), proven or fitted


def _edits(record: Record, update: UpdateComparison) -> list[GradientsEdited]:
    """Where gradients shrink by hand, by a number of their own after each backward pass.

    One number that is the same every time is a division, which the weights of the micro-batches tell.
    """
    edits = [event for event in record.calls.inside(GradientsEdited) if event.update == update.number]
    factors = [factor for event in edits for factor in event.factors]
    # clipping never makes a gradient longer
    if not edits or any(factor is not None and abs(factor) >= 1.0 for factor in factors):
        return []
    if record.together is not None and None in factors:
        return []  # the gradient of several ranks, which the script reduces by hand, is no multiple of one rank's own
    # a single number of 1/K is a division as well
    usual = factors[0] if len(factors) > 1 else 1 / max(update.window.steps, 1)
    is_division = usual is not None and all(
        factor is not None and math.isclose(factor, usual, rel_tol=FIT_FLOAT32) for factor in factors
    )
    return [] if is_division else edits


def _finding_of_edits(record: Record, update: UpdateComparison, edits: Sequence[GradientsEdited]) -> Finding:
    factors = [factor for event in edits for factor in event.factors]
    known_factors = [factor for factor in factors if factor is not None]
    by = (
        f"multiplied by {weights_text(known_factors, each=False)}"
        if len(known_factors) == len(factors)
        else "clipped element by element"
    )
    control, proven = _without_clips(record)
    return finding_of(
        f"gradients are clipped by hand {word_times(len(edits))} in update {update.number}, before the last backward "
        "pass",
        measured_evidence("events", f"a partly accumulated gradient is {by}", factors=known_factors),
        *control,
        remedy=_CLIP_ONCE,
        location=first_place(edits),
        proven=proven,
        together=map(place_of, edits),
    )


@rule("GAV607")
def scheduler_per_micro_batch(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where a scheduler steps inside a window."""
    record = comparison.record
    inside = record.calls.inside(SchedulerStep)
    if not inside:
        return
    number = inside[0].update
    window = record.calls.window_of(number)
    # several schedulers may step in one update: each is counted on its own
    calls = [event for event in (window.of(SchedulerStep) if window else ()) if event.scheduler == inside[0].scheduler]
    rates = _word_rates(record.update_of(number))
    yield finding_of(
        f"the learning-rate scheduler steps {word_times(len(calls))} in update {number}",
        measured_evidence(
            "events",
            f"{len(inside)} scheduler steps before the last backward pass of an update{rates}",
            inside=len(inside),
            update=number,
        ),
        remedy="step the scheduler once per update, after the optimizer's step",
        location=first_place(inside),
        proven=True,
        together=map(place_of, inside),
    )


def _word_rates(update: UpdateComparison | None) -> str:
    """The learning rates of both runs, where they differ."""
    if update is None:
        return ""
    pairs = zip(update.step.learning_rates, update.step.learning_rates_full, strict=False)
    if all(math.isclose(*pair, rel_tol=SAME_IN_FLOAT32) for pair in pairs):
        return ""
    rates, full = show_distinct(update.step.learning_rates, update.step.learning_rates_full)
    return f"; learning rate of update {update.number}: {rates}, in the full-batch run {full}"


@rule("GAV608")
def scaler_per_micro_batch(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where a scaler is unscaled or updated inside a window."""
    inside = [call for call in comparison.calls.inside(ScalerCall) if not call.skipped]
    # `step` inside the window is GAV601, for scaled and unscaled training alike
    inside = [call for call in inside if call.call in ("unscale_", "update")]
    if not inside:
        return
    number = inside[0].update
    calls = Counter(f"`{event.call}`" for event in inside if event.update == number)
    text = " and ".join(f"{call} {word_times(count)}" for call, count in calls.items())
    yield finding_of(
        f"the gradient scaler is used too early in update {number}: {text} before the last backward pass",
        measured_evidence(
            "events",
            f"{len(inside)} calls on partly accumulated gradients in all recorded updates",
            inside=len(inside),
            update=number,
        ),
        remedy="call `unscale_`, `step` and `update` once per update, after the last backward pass",
        location=first_place(inside),
        proven=True,
    )


_SHOWN = 4  # settings that are listed


@rule("GAV609")
def step_settings_differ(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding at the first update that is made with other settings, or by another step."""
    record, calls = comparison.record, comparison.calls
    for update in record.updates:
        # the step cancels a factor of the gradient (Adam does) and the weights change alike: nothing is left to explain
        if not update.judged or update.step.takes_factor:
            continue
        settings = _unexplained_settings(calls, update)
        changed = any(stage.stage is Stage.CHANGE and stage.outcome is Outcome.DIVERGENT for stage in update.stages)
        # a scheduler that steps too often changes the weights as well, and GAV607 reports it
        if settings or (changed and not calls.inside(SchedulerStep)):
            yield _finding_of_settings(calls, update, settings)
            return


def _unexplained_settings(calls: Calls, update: UpdateComparison) -> list[SettingDifference]:
    """The settings that differ, without rates where a scheduler that steps inside windows is found as such."""
    rates = bool(calls.inside(SchedulerStep))
    return [setting for setting in update.step.settings if not (rates and setting.name.endswith("lr"))]


def _finding_of_settings(calls: Calls, update: UpdateComparison, settings: list[SettingDifference]) -> Finding:
    names = ", ".join(dict.fromkeys(f"`{setting.name}`" for setting in settings[:_SHOWN]))
    what = (
        f"uses another {names} than the full-batch run"
        if settings
        else "turns the same gradient into another change of the weights"
    )
    descriptions = [
        "`{}` {}{}, in the full-batch run {}".format(setting.name, *_show_setting(setting))
        for setting in settings[:_SHOWN]
    ]
    moved = [stage for stage in update.stages if stage.stage is Stage.CHANGE]
    descriptions += [
        f"for the same gradients the weights change {stage.norm_ratio:.4g} times as much as in the full-batch run"
        for stage in moved
        if stage.outcome is Outcome.DIVERGENT and math.isfinite(stage.norm_ratio)
    ]
    return finding_of(
        f"update {update.number} {what}",
        measured_evidence(
            "comparison",
            "; ".join(descriptions),
            update=update.number,
            settings=[vars(setting) for setting in settings],
        ),
        remedy=_repair_settings(calls, update, settings),
        location=first_place(_writers(calls, update)),
        proven=True,
    )


def _repair_settings(calls: Calls, update: UpdateComparison, settings: list[SettingDifference]) -> str:
    """Returns the repair of settings that differ between ranks, or between the two runs."""
    if any(setting.rank for setting in settings):
        return "give every rank the same settings: replicas that step differently drift apart"
    taken = [
        sum(len(window.of(SchedulerStep)) for window in windows if window.number < update.number)
        for windows in (calls.windows, calls.full_windows)
    ]
    rates = bool(settings) and all(setting.name.endswith("lr") for setting in settings)
    # a schedule that took as many steps in both runs and gives another rate was made with another length
    if rates and taken[0] == taken[1] > 0:
        return (
            "the schedule advances once per update, as in the full-batch run: give its length (`T_max`, `total_steps`) "
            "in updates, the number of micro-batches divided by K"
        )
    return (
        "count updates, not micro-batches: advance the schedule or counter behind this setting once per optimizer step"
    )


def _show_setting(setting: SettingDifference) -> tuple[str, str, str]:
    """The value, whose it is where that is not rank 0, and the full-batch run's value."""
    accumulated, full = show_distinct([setting.accumulated], [setting.full])
    return accumulated, f" in rank {setting.rank}" if setting.rank else "", full


def _writers(calls: Calls, update: UpdateComparison) -> list[Event]:
    """The last events that set something before the update's step, latest first; then the step itself."""
    events = [event for window in calls.windows if window.number <= update.number for event in window.events]
    # a line that writes a setting is the cause; a step only uses it
    setters = [event for window in calls.windows for event in window.of(SettingsChanged) if event.file is not None]
    return [*setters[:1], *(event for event in reversed(events) if isinstance(event, SchedulerStep | Step))]
