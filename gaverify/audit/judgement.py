"""Compares every update of both runs, parameter by parameter, against the noise floor of the perturbed run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gaverify.audit.ranks import RankedRun
from gaverify.audit.reading import Moment, RecordedRun, Samples, labels
from gaverify.audit.same_data import check_rows
from gaverify.audit.stages import (
    ComparedRows,
    Runs,
    clips_of,
    compare_changes,
    compare_gradients,
    decide_by_weights,
    fit_of,
    is_led,
    setting_differences,
    terms_of,
)
from gaverify.errors import ProblemError
from gaverify.passes.precision import buffers_differ, unit_roundoff
from gaverify.records.audit import (
    Clip,
    RowCheck,
    SettingDifference,
    Stage,
    StageComparison,
    StepComparison,
    UpdateComparison,
)
from gaverify.records.events import Backward, Event, Forward, ledger_of
from gaverify.records.experiment import WeightFit
from gaverify.records.outcomes import Outcome
from gaverify.records.windows import (
    AccumulationWindow,
    Round,
    Window,
    common_rounds,
    keys_of,
    number_steps,
    rounds_of,
    windows_of,
)
from gaverify.rules.rule import join_texts
from gaverify.thresholds import COMPUTED_FLOAT32, FIT_FLOAT32, LOST_SHARE, MANY_UNITS, VISIBLE
from gaverify.verdict.criteria import floors_allowed


def compare_updates(
    full: RecordedRun,
    perturbed: RecordedRun,
    accumulated: RecordedRun,
    updates: int,
    *,
    unclipped: bool = False,
    extra_perturbed: Sequence[tuple[RecordedRun, float]] = (),
) -> tuple[UpdateComparison, ...]:
    """Returns a comparison for each update that both runs made, at most `updates` of them.

    Args:
        full: The full-batch run.
        perturbed: The same with moved weights.
        accumulated: The accumulated run.
        updates: How many are wanted.
        extra_perturbed: More runs with moved weights, and what their losses are multiplied by: the largest noise
            floor counts.
        unclipped: Nothing can have been clipped, so that what the optimizers saw decides.
    """
    _check_parameters(full, accumulated)
    rounds = common_rounds(full.events, accumulated.events)
    runs = Runs(full, perturbed, accumulated, labels(full, accumulated), tuple(extra_perturbed))
    windows = [
        {window.number: window for window in windows_of(run.events, number_steps(rounds))}
        for run in (full, accumulated)
    ]
    # Steps of networks that take turns are rounds of their own: one update then makes several rounds.
    most = sum(len(round_) for round_ in rounds_of(full.events)[:updates])
    compared: list[UpdateComparison] = []
    step_count = 0
    for number, round_ in enumerate(rounds, 1):
        step_count += len(round_)
        has_steps = all(run.samples(round_).steps for run in (full, accumulated))
        if not has_steps or (step_count > most and number > updates):
            break
        window_pair = [by_number.get(number, Window(number, ())) for by_number in windows]
        compared.append(_compare_update(runs, round_, number, *window_pair, unclipped=unclipped))
    return tuple(compared)


def _compare_update(
    runs: Runs, round_: Round, number: int, full_window: Window, window: Window, *, unclipped: bool
) -> UpdateComparison:
    unit = working_unit(runs.full)
    full, accumulated = runs.full.samples(round_), runs.accumulated.samples(round_)
    fit = fit_of(full, accumulated)
    # A window of several networks holds forwards of all: the rows of the network that stepped decide.
    data = _data_of_networks(runs, round_) or _data(runs.full, full, runs.accumulated, accumulated)
    terms = terms_of(accumulated, fit)
    fit_used = fit_of(full, accumulated, summed=False)
    used = decide_by_weights(compare_gradients(runs, round_, unit, terms, summed=False), fit_used, unit)
    summed = used
    if full.of("summed") or accumulated.of("summed"):
        summed = decide_by_weights(compare_gradients(runs, round_, unit, terms, summed=True), fit, unit)
    clips, clips_full = clips_of(window), clips_of(full_window)
    # One rank may step with other settings although all have the same gradient: every process is looked at.
    each = runs.accumulated.each(round_)
    change = farthest_change(full, each, unit)
    decided, unclear = Stage.USED, False
    if not unclipped:
        # Whether gradients were changed by hand between the last clipping and the step; ranks may be reduced there.
        late = len(each) == 1 and any(step.by_hand for step in window.steps)
        decided, unclear = _deciding(full, used, summed, clips + clips_full, late)
    rows = summed if decided is Stage.SUMMED else used
    unrepeatable = _unrepeatable(runs, round_, number, unit, rows.noise)
    start_difference = _distance(full, accumulated, "before")
    # Asked only for other samples: it reads the rows of the next update as well.
    fed, never_fed = (None, 0) if data.same else _unlike_samples(runs, full, accumulated)
    # The micro-batches that were fed make up the full batch's gradient with some weights.
    explains_all = fit is not None and not fit.vacuous and fit.residual < COMPUTED_FLOAT32
    if fed is not None and fed.is_part and explains_all:
        data = replace(fed, adds_nothing=True)
    judged = (
        # `not a > b` and not `a <= b`: an unknown distance is NaN, and must not forbid the comparison.
        data.is_comparable and not unrepeatable and not start_difference > _start_allowed(runs, round_, number, unit)
    )
    open_ = unclear and used.outcome is Outcome.EQUIVALENT  # what differs at both stages differs however it is read
    outcome = Outcome.INCONCLUSIVE if unrepeatable or open_ else rows.outcome
    # The same rows stand for both stages where nothing changed the sum: the report would show one line twice.
    stages = [*([summed.stage(Stage.SUMMED)] if summed is not used else []), used.stage(Stage.USED)]
    if change is not None and judged:
        stages.append(change)
    backwards = window.of(Backward)
    # The weights in the report have to belong to the gradients that decided, or they contradict the verdict.
    of_sum = decided is Stage.SUMMED or summed is used
    divisors = tuple(math.nan if backward.counted is None else backward.counted for backward in backwards)
    valid = tuple(max((count for count, _ in backward.targets), default=-1) for backward in backwards)
    return UpdateComparison(
        number=number,
        outcome=outcome,
        judged=judged,
        parameters=rows.parameters,
        data=data,
        window=AccumulationWindow(
            steps=len(backwards),
            sizes=tuple(forward.rows or 0 for forward in window.of(Forward)),
            losses=tuple(backward.loss for backward in backwards),
            full_loss=_full_loss(full, full_window, summed=of_sum),
            valid_targets=valid if valid and min(valid) >= 0 else (),
            ignored_targets=any(count < total for backward in backwards for count, total in backward.targets),
            divisors=divisors if all(map(math.isfinite, divisors)) else (),
            scales=tuple(backward.scales for backward in backwards),
        ).refit(_without_passes_of_others(runs, window, fit if of_sum else fit_used)),
        step=StepComparison(
            learning_rates=_rates(accumulated),
            learning_rates_full=_rates(full),
            # A step that was given the full batch's gradient hides how far the weights would come apart.
            weights_difference=math.nan if any(map(is_led, each)) else _distance(full, accumulated, "weights"),
            drifted=_find_drifted(full, accumulated, unit),
            clips=clips,
            clips_full=clips_full,
            settings=differing_settings(full, each) if judged else (),
        ),
        started_apart=start_difference,
        noise=rows.noise,
        unrepeatable=unrepeatable,
        decided=decided,
        unclear=unclear,
        stages=tuple(stages),
        fed=fed,
        never_fed=never_fed,
    )


def _full_loss(full: Samples, window: Window, *, summed: bool) -> float:
    """The loss whose gradient is the full batch's; NaN where that gradient is no weighted sum of the backward passes'.

    A `GradScaler` differentiates the loss times its scale, and takes it out of the gradient later.
    """
    fit, losses = fit_of(full, full, summed=summed), [backward.loss for backward in window.of(Backward)]
    # With clipped or otherwise edited gradients the losses do not add up as the gradients do.
    if fit is None or fit.residual > COMPUTED_FLOAT32 or len(fit.weights) != len(losses):
        return math.nan
    return sum(weight * loss for weight, loss in zip(fit.weights, losses, strict=True))


def farthest_change(full: Samples, each: Sequence[Samples], unit: float) -> StageComparison | None:
    """Returns the change of the weights in the process where it is farthest from the full-batch run's."""
    per_process = [compare_changes(full, samples, unit) for samples in each if is_led(samples)]
    changes = [change for change in per_process if change is not None]
    # The outcome counts first: a process that diverges may differ by less than one whose rounding allows more.
    return max(
        changes, key=lambda change: (change.outcome is Outcome.DIVERGENT, _difference_or_inf(change)), default=None
    )


def _difference_or_inf(change: StageComparison) -> float:
    return change.relative_difference if math.isfinite(change.relative_difference) else math.inf


def differing_settings(full: Samples, each: Sequence[Samples]) -> tuple[SettingDifference, ...]:
    """Returns the settings in which the first process with such differs from the full-batch run."""
    for rank, samples in enumerate(each):
        differences = setting_differences(full, samples)
        if differences:
            return tuple(replace(difference, rank=rank) for difference in differences)
    return ()


def _data_of_networks(runs: Runs, round_: Round) -> RowCheck | None:
    """Compares what the round's networks were fed since their optimizers last stepped, if other networks train as well.

    One network's loss may run through another (a generator's through its critic), so that samples count once.
    """
    both_runs = (runs.full, runs.accumulated)
    trained = runs.accumulated.models_by_optimizer
    stepped = {optimizer for optimizer, _ in round_}
    # One optimizer, or all at once: the rows of the whole window are those of the step.
    if not stepped < set(trained):
        return None
    stretches = [_events_since_last_step(run, round_) for run in both_runs]
    checks = []
    for optimizer in stepped:
        fed = [_forwards_reached(events, optimizer, trained[optimizer]) for events in stretches]
        rows = [run.rows_behind(forwards) for run, forwards in zip(both_runs, fed, strict=True)]
        # In a GAN the critic sees the samples in its own pass and in the generator's: their number differs by design.
        checks.append(check_rows(*rows, distinct=True))
    checked = [check for check in checks if check.checked]
    return next((check for check in checked if not check.same), next(iter(checked), None))


def _without_passes_of_others(runs: Runs, window: Window, fit: WeightFit | None) -> WeightFit | None:
    """The fit; None where passes of another network's loss are in the gradient and should not be: no weight is wrong.

    Such a pass also reaches an optimizer that has parameters of its own; a wrapper's holds the same ones.
    """
    passes = window.of(Backward)
    if fit is None or len(fit.weights) != len(passes) or fit.residual >= FIT_FLOAT32:
        return fit
    names: dict[int, set[str]] = {}
    for (optimizer, _), (name, _) in runs.accumulated.parameters.items():
        names.setdefault(optimizer, set()).add(name)
    stepped = set[str]().union(*(names.get(optimizer, set()) for optimizer in window.optimizers))
    other_optimizers = {optimizer for optimizer, each in names.items() if each - stepped}
    least = LOST_SHARE * max(map(abs, fit.weights), default=0.0)
    unwanted = [backward for weight, backward in zip(fit.weights, passes, strict=True) if abs(weight) < least]
    return fit if all(other_optimizers.isdisjoint(backward.optimizers) for backward in unwanted) else None


def _events_since_last_step(run: RecordedRun, round_: Round) -> Sequence[Event]:
    """The events between the last steps of a round's optimizers before it and the steps of the round."""
    places = {key: run.events.index(step) for key, step in keys_of(run.events)}
    ends = [places[key] for key in round_ if key in places]
    begins = [places.get((optimizer, number - 1), -1) for optimizer, number in round_]
    return run.events[min(begins) + 1 : max(ends, default=0)]


def _forwards_reached(events: Sequence[Event], optimizer: int, models: frozenset[int]) -> list[Forward]:
    """The forwards of some models that were reached by the backward passes into an optimizer's gradients."""
    passes = [event for event in events if isinstance(event, Backward) and optimizer in event.optimizers]
    reached = {number for backward in passes for number in backward.forwards or ()}
    forwards = [event for event in events if isinstance(event, Forward) and event.model in models]
    return [forward for forward in forwards if forward.number in reached]


def _deciding(
    full: Samples, used: ComparedRows, summed: ComparedRows, clips: tuple[Clip, ...], late: bool
) -> tuple[Stage, bool]:
    """Returns the stage that decides an update, and whether it stays unclear which of the two is right.

    An active clip hides a wrong scale, so the sum just before the clip counts. A script that edits gradients after the
    clip (`late`) may divide them there. Without a clip, a gradient that only the accumulated run changed and that ends
    like the full batch's was divided, or put together elsewhere. Any other gradient that was changed without a known
    call may have been divided or clipped by hand: a control tells.
    """
    if summed is used:
        return Stage.USED, False
    # Two different gradients over the limit have the same norm after the clip: a missing division would not show.
    if any(clip.active for clip in clips):
        late = late and used.outcome is not Outcome.EQUIVALENT and summed.outcome is not Outcome.EQUIVALENT
        return (Stage.USED if late or summed.outcome is Outcome.EQUIVALENT else Stage.SUMMED), late
    if summed.outcome is Outcome.EQUIVALENT or (used.outcome is Outcome.EQUIVALENT and not full.of("summed")):
        return Stage.USED, False
    return (Stage.SUMMED if used.outcome is Outcome.EQUIVALENT else Stage.USED), True


def _data(full_run: RecordedRun, full: Samples, own_run: RecordedRun, accumulated: Samples) -> RowCheck:
    """Whether both were fed the same rows: those that a backward pass reached, or all of them."""
    checks = [
        check_rows(full_run.rows_of(full, reached=reached), own_run.rows_of(accumulated, reached=reached))
        for reached in (True, False)
    ]
    return next(
        (check for check in checks if check.checked and check.same), checks[0] if checks[0].checked else checks[1]
    )


def _unlike_samples(runs: Runs, full: Samples, accumulated: Samples) -> tuple[RowCheck | None, int]:
    """The check of all rows of an update, and how many of the full batch's rows the next update is not fed either."""
    # `rows` of several ranks are those of rank 0 alone: the samples of all others would seem to be missing.
    if isinstance(runs.accumulated, RankedRun):
        return None, 0
    full_rows, own_rows = runs.full.rows_of(full, reached=False), runs.accumulated.rows_of(accumulated, reached=False)
    following = runs.accumulated.rows(max(accumulated.updates) + 1)
    # A step that comes too early leaves its samples to the next updates; behind the last one nothing was recorded.
    next_fed = check_rows(full_rows, following)
    has_passed_on = next_fed.accumulated > next_fed.full - next_fed.missing  # to samples of the next full batch
    never_fed = check_rows(full_rows, [*own_rows, *following]).missing if has_passed_on else 0
    return check_rows(full_rows, own_rows), never_fed


def windows_skipped_alike(full: RecordedRun, accumulated: RecordedRun) -> frozenset[int]:
    """Returns the windows in which both runs throw away the gradients of the same samples.

    Scripts skip an update whose gradient is too large or not finite, in both runs alike.
    """
    forwards = [_forwards_lost(run) for run in (full, accumulated)]
    return frozenset(
        window
        for window in forwards[0].keys() & forwards[1].keys()
        if _are_same_samples(full, forwards[0][window], accumulated, forwards[1][window])
    )


def _forwards_lost(run: RecordedRun) -> dict[int, list[Forward]]:
    """The forwards behind the backward passes that no step used, by window."""
    by_number = {event.number: event for event in run.events if isinstance(event, Forward)}
    return {
        loss.window: [by_number[number] for backward in loss.backwards for number in backward.forwards or ()]
        for loss in ledger_of(run.events).lost
    }


def _are_same_samples(
    full: RecordedRun, forwards_full: list[Forward], accumulated: RecordedRun, forwards: list[Forward]
) -> bool:
    counts = [sum(forward.rows or 0 for forward in side) for side in (forwards_full, forwards)]
    if not counts[0] or counts[0] != counts[1]:
        return False
    check = check_rows(full.rows_behind(forwards_full), accumulated.rows_behind(forwards))
    return check.same  # unchecked rows, as of the window that a run ended in, are told apart by their number alone


def working_unit(run: RecordedRun) -> float:
    """Returns the unit roundoff of the coarsest arithmetic that a run trained in."""
    return run.closing.arithmetic.unit or unit_roundoff(torch.float32)


def _check_parameters(full: RecordedRun, accumulated: RecordedRun) -> None:
    """Raises unless both runs trained the same parameters: the same shapes in the same places of their optimizers."""
    a, b = ({place: shape for place, (_, shape) in run.parameters.items()} for run in (full, accumulated))
    if a == b:
        return
    named = [{key.partition(":")[2]: shape for key, shape in run.parameters.values()} for run in (full, accumulated)]
    missing = [f"`{name}` only in the full-batch run" for name in named[0] if name not in named[1]]
    missing += [f"`{name}` only in the accumulated run" for name in named[1] if name not in named[0]]
    missing += [
        f"`{name}` is {list(shape)} and {list(named[1][name])}"
        for name, shape in named[0].items()
        if named[1].get(name, shape) != shape
    ]
    listing = join_texts(missing, 5) or "their optimizers have them in another order"
    raise ProblemError(
        f"the two runs trained different parameters: {listing}; let their arguments differ only in how the batch is "
        "cut into micro-batches"
    )


def _start_allowed(runs: Runs, round_: Round, number: int, unit: float) -> float:
    """How far weights may be apart before an update: by rounding, and what earlier updates made of that."""
    grown = 0.0
    if number > 1:
        grown = _distance(runs.full.samples(round_), runs.perturbed.samples(round_), "before")
    return max(MANY_UNITS * unit, floors_allowed(unit) * (grown if math.isfinite(grown) else 0.0))


def _unrepeatable(runs: Runs, round_: Round, number: int, unit: float, noise: float) -> str:
    full, perturbed = runs.full.samples(round_), runs.perturbed.samples(round_)
    # The perturbed run may lack this update: then nothing tells whether it repeats itself.
    if not perturbed.steps:
        return ""
    start = _distance(full, perturbed, "before")
    # Only before the first update: later weights differ by what training makes of one roundoff, which may be much.
    if number == 1 and start > MANY_UNITS * unit:
        return f"initial weights differ by {start:.1e} (relative) between two such runs"
    # One division by K = 2 too many halves the gradient: noise above that would hide such a fault completely.
    if floors_allowed(unit) * noise > VISIBLE:
        rows = _data(runs.full, full, runs.perturbed, perturbed)
        row_note = "" if rows.same else f", and so do {rows.differing} of {rows.full} rows"
        return f"gradients differ by {noise:.1e} (relative) between two such runs{row_note}"
    return ""


def _rates(samples: Samples) -> tuple[float, ...]:
    settings = (group for step in samples.steps.values() for group in step.settings)
    return tuple(group["lr"] for group in settings if "lr" in group)


def _distance(full: Samples, accumulated: Samples, when: Moment) -> float:
    """How far the weights are apart, relative, over sampled elements that stand for their share of a parameter."""
    ours, theirs = full.of(when), accumulated.of(when)
    common = [at for at in ours if at in theirs and len(theirs[at]) == len(ours[at])]
    size = full.norm({at: ours[at] for at in common})
    return full.norm({at: theirs[at] - ours[at] for at in common}) / size if size else math.nan


def _find_drifted(full: Samples, accumulated: Samples, unit: float) -> tuple[str, ...]:
    names = []
    buffers, own_buffers = full.buffers, accumulated.buffers
    for name, value in buffers.items():
        own_value = own_buffers.get(name)
        if own_value is None:  # one run calls a wrapper, the other what is inside it: another name is no drift
            alike = [key for key in own_buffers if key not in buffers and _ends_alike(key, name)]
            own_value = own_buffers[alike[0]] if len(alike) == 1 else None
        if own_value is not None and buffers_differ(own_value, value, unit):
            names.append(name.partition(":")[2])
    return tuple(names)


def _ends_alike(one: str, other: str) -> bool:
    short, long = sorted((f".{name.partition(':')[2]}" for name in (one, other)), key=len)
    return long.endswith(short)
