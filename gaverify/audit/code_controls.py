"""Controls for code that forwards and backward passes run: state that they change, gradients that are transformed.

State is a module's buffer, frozen parameter or attribute, such as a moving average or a counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from gaverify.audit.bench import ScriptBench, difference_allowed
from gaverify.audit.coupling_controls import (
    WATCHED,
    CallKey,
    Pair,
    WatchedRuns,
    agree,
    calls_of_pair,
    pin_code,
    rows_of_pair,
    watch_modules,
)
from gaverify.audit.job import (
    AlignState,
    DisableCompilation,
    RestoreState,
    WeightMicroBatches,
)
from gaverify.audit.outcome import is_explained, is_proven
from gaverify.audit.reading import ParameterPlace, RecordedRun, Samples, labels
from gaverify.audit.recording.outputs import SCRIPT, RecordedCall
from gaverify.audit.recording.state import EVERYTHING
from gaverify.audit.running import Trial
from gaverify.audit.stages import fit_gradients
from gaverify.records.audit import Record, Stage, TransformedGradients, UpdateComparison
from gaverify.records.comparison import NextUpdate, State, StateChange
from gaverify.records.events import Backward, CarriedValue, ChangedValue
from gaverify.records.experiment import Cause, ControlKind, ControlRun, Operation, Suspect, WeightFit
from gaverify.records.outcomes import Outcome
from gaverify.records.windows import Round
from gaverify.rules.rule import join_texts
from gaverify.rules.scale import contradict_losses
from gaverify.search.bench import Intervention
from gaverify.search.state import find_blamed
from gaverify.thresholds import FIT_FLOAT32, TINY
from gaverify.tracebacks import display_path

# The control for losses that add up although gradients do not: which code's backward depends on the batch?
#
# Both runs are made again, and record the gradients of all modules' outputs. Up to the weights of the micro-batches
# they agree behind the code at fault, which the backward pass reaches first, and differ before it. The control pins
# the gradients that this code gives back.


def control_backward(trial: Trial, record: Record) -> Record:
    """Returns the record with the code whose backward depends on the batch, if the losses contradict fitted weights."""
    update = record.divergent
    if update is None or not contradict_losses(record, update):
        return record
    # Each run may divide its losses, or the gradients after its backward passes, by another number.
    factor = full_batch_weight(record, update) / update.window.fit.used[0] if update.window.fit is not None else 1.0
    bench = ScriptBench(trial, record, update, "coupling", WATCHED)
    runs = watch_modules(bench)
    if not runs.pairs_by_rank or not agree(runs.pairs, record.unit):
        return record
    cause: Cause | None = None
    for operation in _candidates(runs, factor, record.unit, update.number):
        path = SCRIPT if operation.module is None else operation.module
        name = "the loss" if operation.module is None else f"`{path or '(root)'}`"
        what = f"the gradient from {name} replaced by the full batch's"
        control = bench.run(
            pin_code(bench, what, (path,), runs.pairs_by_rank, blamed="gradients", factor=factor), fit=True
        )
        suspect = Suspect("rows", operation, None, update.relative_difference, 0, operation.module is not None, False)
        # without a control that proves something the likeliest candidate is suspected
        cause = Cause(suspect, control) if cause is None or control.proves else cause
        if control.proves:
            break
    return replace(record, controls=replace(record.controls, backward=cause))


def full_batch_weight(record: Record, update: UpdateComparison) -> float:
    """Returns the factor between the full batch's loss and the losses that its run differentiates."""
    windows = [window for window in record.calls.full_windows if window.number == update.number]
    losses = sum(backward.loss for window in windows for backward in window.of(Backward))
    return update.window.full_loss / losses if losses else math.nan


def _candidates(runs: WatchedRuns, factor: float, unit: float, update: int) -> Iterator[Operation]:
    """Yields the code whose backward may be at fault.

    That is the module behind the last gradient that differs, then the code around both: a module or the loss.
    """
    pairs = [pair for pair in runs.pairs if pair is not None]
    differing = {key for pair in pairs for key in _differing_calls(pair, factor, unit)}
    calls = [(key, full_call) for key, full_call, _ in calls_of_pair(pairs[0])] if pairs else []
    # in the order in which calls end: the backward pass reaches the last of them first
    for at, (key, call) in reversed([*enumerate(calls)]):
        around = call["under"]
        agrees_around = around == SCRIPT or not any(path == around for path, _ in differing)
        if key not in differing or not agrees_around:
            continue
        # Calls that end before this one differ because gradients flow back through it: none of them is a candidate.
        behind = [
            candidate for name, candidate in calls[at + 1 :] if candidate["under"] == around and name not in differing
        ]
        yield from (_operation_of(candidate) for candidate in behind[:1])
        if around == SCRIPT:
            yield _operation_of_loss(runs, update)
        else:
            yield from (_operation_of(candidate) for _, candidate in calls if candidate["path"] == around)
        return


def _differing_calls(pair: Pair, factor: float, unit: float) -> Iterator[CallKey]:
    """Yields the calls whose output gradients of a micro-batch's rows are not `factor` times the full batch's."""
    for key, full_call, micro_call in calls_of_pair(pair):
        gradients = full_call["gradients"], micro_call["gradients"]
        for path in gradients[0].keys() & gradients[1].keys():
            rows = rows_of_pair(pair, gradients[0][path], gradients[1][path])
            if rows is not None and _relative_difference(factor * rows[0], rows[1]) > difference_allowed(unit):
                yield key


def _relative_difference(full: torch.Tensor, part: torch.Tensor) -> float:
    # The third entry is a norm, which is the same for a gradient of the other sign.
    return float((full - part)[..., :2].abs().max() / full[..., :2].abs().max().clamp_min(TINY))


def _operation_of(call: RecordedCall) -> Operation:
    file, line = call["place"] or (None, None)
    return Operation("backward", call["path"], call["kind"], file=file and display_path(file), line=line)


def _operation_of_loss(runs: WatchedRuns, update: int) -> Operation:
    """Returns the loss, at the line of a function with a backward of its own if it has one, else where it is made."""
    event = next(event for event in runs.full.events if isinstance(event, Backward) and event.update == update)
    lines = [*event.origin.custom, *event.origin.met[-1:], event.place]
    file, line = next((place for place in lines if place is not None), (None, None))
    return Operation("backward", file=file and display_path(file), line=line)


# The control for gradients that a script transforms in each micro-batch before it adds them up.
#
# Such a script transforms the gradient of each backward pass (orthogonalises, clips, takes the sign), and assigns the
# sum to `.grad` before the step. No call tells of the transformation, but the gradients that the optimizer sees do.
# U(a, b) are those with the losses of the window's first half multiplied by a, and those of its second half by b.
#
#     U(s, s) = s U(1, 1)                       the transformation is linear: micro-batches and their sum give the same
#     U(s, 1) + U(1, s) = U(1, 1) + U(s, s)     each micro-batch is transformed on its own, and the results are added up


_FACTOR = -0.5  # s: a power of two rounds nothing, and a negative one shows transformations that ignore signs

Gradients = Mapping[ParameterPlace, torch.Tensor]


def find_transformed_gradients(trial: Trial, record: Record) -> Record:
    """Returns the record with the parameters whose gradients are transformed in each micro-batch, if any are.

    The control is needed if the optimizer sees no weighted sum of the backward passes' gradients, or if the right
    weights leave a difference. The gradients of the passes have to add up to the full batch's: else the fault lies
    before the transformation.
    """
    update = record.divergent
    if update is None or record.ranks > 1 or update.window.steps < 2 or not _may_be_transformed(record, update):
        return record
    if update.differs_after_passes:  # noise that is added to the sum once answers like a transformation
        return record
    round_ = trial.rounds[update.number - 1]
    difference_of_sums = _compare_sums(trial.full.samples(round_), trial.accumulated.samples(round_))
    first_half = update.window.steps // 2
    second_half = update.window.steps - first_half
    factors = [(a,) * first_half + (b,) * second_half for a, b in ((_FACTOR, 1.0), (1.0, _FACTOR), (_FACTOR, _FACTOR))]
    shares = [trial.factors_of_passes(record, each) for each in factors]
    if not difference_of_sums <= record.tolerance or not all(shares):
        return record
    runs = trial.runner.record(
        *(
            trial.control("accumulated", WeightMicroBatches(each), updates=update.number, shown_as="transformed")
            for each in shares
        )
    )
    used = [_used_gradients(run, update, round_) for run in (trial.accumulated, *runs)]
    transformed = compare_responses(record, update, labels(trial.full, trial.accumulated), *used)
    transformed = transformed and replace(transformed, sums_difference=difference_of_sums)
    return replace(record, controls=replace(record.controls, transformed=transformed))


def compare_responses(
    record: Record,
    update: UpdateComparison,
    names: Mapping[ParameterPlace, str],
    unchanged: Gradients,
    first: Gradients,
    second: Gradients,
    both: Gradients,
) -> TransformedGradients | None:
    """Returns the differing gradients that are no linear function of the losses; None if there are none.

    Args:
        record: The facts of the runs.
        update: The first that differs.
        names: The names of the parameters.
        unchanged: U(1, 1), the gradients that the optimizer sees.
        first: U(s, 1).
        second: U(1, s).
        both: U(s, s).
    """
    divergent = {row.name for row in update.parameters if row.outcome is Outcome.DIVERGENT}
    allowed = max(FIT_FLOAT32, record.tolerance)
    transformed: dict[str, tuple[float, float]] = {}  # ‖U(s, s)‖ / ‖U(1, 1)‖, and the difference of the halves
    for place, gradient in unchanged.items():
        if not all(place in run for run in (first, second, both)) or names.get(place) not in divergent:
            continue
        nonlinear_part = _norm(both[place] - _FACTOR * gradient)
        norms = sum(_norm(each[place]) for each in (first, second, both, unchanged))
        interaction = _norm(first[place] + second[place] - gradient - both[place]) / norms if norms else math.inf
        if nonlinear_part > allowed * _norm(gradient) and interaction <= record.tolerance:
            transformed[names[place]] = _norm(both[place]) / _norm(gradient), interaction
    if not transformed:
        return None
    responses, interactions = zip(*transformed.values(), strict=True)
    explains_all = divergent <= set(transformed)
    return TransformedGradients(tuple(transformed), abs(_FACTOR), responses, math.nan, max(interactions), explains_all)


def _may_be_transformed(record: Record, update: UpdateComparison) -> bool:
    if record.controls.weighted_run is not None and not record.controls.weighted_run.rounding:
        return True
    is_no_weighted_sum = update.window.fit is not None and update.window.fit.used_residual > record.tolerance
    return is_no_weighted_sum and not is_explained(record)


def _compare_sums(full: Samples, accumulated: Samples) -> float:
    """Returns how far the sum of the backward passes' gradients is from the full batch's, up to one factor."""
    sums = []
    for samples in (full, accumulated):
        total: dict[int, torch.Tensor] = {}
        for increment in samples.increments:
            total |= {at: change + total[at] if at in total else change for at, change in increment.items()}
        sums.append(total)
    fit = fit_gradients(sums[0], full.stretches, sums[1], accumulated.increments)
    return math.inf if fit is None else fit.factor_residual


def _used_gradients(run: RecordedRun, update: UpdateComparison, round_: Round) -> Gradients:
    """Returns the gradients that decided about an update: before the window's last clipping, or after it."""
    # Differences of them are taken: in bfloat16 these would be rounded by as much as is looked for.
    return {
        place: each.double() for place, each in run.gradients(round_, summed=update.decided is Stage.SUMMED).items()
    }


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient))


# The controls for state: which values have to be neutralised in each run of a script is asked as of a process.


def _find_blamed(
    bench: ScriptBench, changes: tuple[StateChange, ...], neutralise: Callable[[Sequence[str]], Sequence[Intervention]]
) -> tuple[StateChange, ...]:
    """Returns the changes that have to be neutralised; none where all of them together are not enough."""

    def run_some(some: Sequence[StateChange]) -> ControlRun | None:
        names = [change.name for change in some]
        return bench.attempt("a control of state", lambda: bench.run(*neutralise(names))) if names else None

    run = run_some(changes)
    if run is None or not run.rounding:
        return ()
    return find_blamed(changes, bench.update.relative_difference, run.kind, run_some).changes


# One update leaves state to the next: it is set to the full-batch run's before each update.


def control_carried_state(trial: Trial, record: Record) -> Record:
    """Sets the state before each update to the full-batch run's, if an update that differs found other state.

    An update whose state differs also seems to mix its samples, so this comes before the search for such code.
    """
    update = record.divergent
    if update is None or record.ranks > 1 or is_explained(record):
        return record
    bench, carried = ScriptBench(trial, record, update, "state"), trial.accumulated.closing.control.carried
    changes = tuple(StateChange(each.name, each.place) for each in carried if each.update == update.number)
    blamed = _find_blamed(bench, changes, _align)
    if not blamed:
        return record
    runs = bench.make_runs(*_align([change.name for change in blamed]), updates=trial.runner.updates)
    control, later = bench.compare(runs), bench.later_updates
    holds = all(bench.difference_left(runs, each) <= bench.rounding_of(each) for each in (update, *later))
    blamed = _with_writers(blamed, runs.accumulated.closing.control.carried)
    state = State(changes, control, blamed, (control,) if holds else (), together=len(blamed) > 1)
    return replace(record, controls=replace(record.controls, state=state))


def _align(names: Sequence[str]) -> list[Intervention]:
    what = f"full-batch run's {join_texts([f'`{name}`' for name in names], 2)} before each update"
    change = AlignState(tuple(names))
    return [Intervention(what, ControlKind.STATE_ALIGNED, in_reference=False, changes=(change,))]


# Forwards change state and read it again: it is restored before each micro-batch.


def control_state(trial: Trial, record: Record) -> Record:
    """Restores state before each micro-batch, if no other fault is proven, and names the values at fault.

    State that causes the whole difference also explains why samples seemed to interact, so that finding is dropped. It
    stays if it is a layer whose evaluation mode removes a part of the difference: the rest is the state's.
    """
    update = record.divergent
    # A value that the loss is handed may itself be state, as a running average in a criterion is.
    is_settled = is_proven(record) and not any(cause.suspect.value for cause in record.controls.coupling)
    # A single micro-batch follows no other whose state it could read.
    if update is None or update.window.steps < 2 or record.ranks > 1 or trial.steps_itself or is_settled:
        return record
    bench = ScriptBench(trial, record, update, "state")
    coupling = record.controls.coupling[-1].control if record.controls.coupling else None
    evaluated = coupling if coupling is not None and coupling.kind is ControlKind.EVALUATION_MODE else None

    def restore(names: Sequence[str]) -> tuple[tuple[ChangedValue, ...], ControlRun]:
        runs = bench.make_runs(*_restore(names, evaluated))
        control = bench.compare(runs, fit=evaluated is None)
        explains_more = control.fit is None or _explains_more(control.fit, update.window.fit, record.tolerance)
        return runs.accumulated.closing.control.changed_values, control if explains_more else replace(control, fit=None)

    changed_values, control = restore([EVERYTHING])
    changes = tuple(StateChange(value.name, value.place) for value in changed_values)
    # weights that explain the rest with all values restored do so with the few that matter, too
    weighing = bench.weigh(control.fit.multipliers) if control.fit is not None else None
    if not changes or not (control.rounding or weighing is not None):
        return record
    weighing_too = [] if weighing is None else [weighing]
    blamed = _find_blamed(bench, changes, lambda names: [*_restore(names, evaluated), *weighing_too])
    if not blamed:
        return record
    names = [change.name for change in blamed]
    changed_values, control = restore(names)
    is_repair = control.rounding and evaluated is None
    state = State(
        changes,
        control,
        _with_writers(blamed, changed_values),
        (control,) if is_repair else (),
        math.nan if is_repair else _difference_of_state(update, evaluated),
        next_update=_repeat(bench, names) if is_repair else None,
        # several values are restored together only where none of them is enough alone
        together=len(blamed) > 1,
    )
    results = replace(record.controls, state=state)
    if weighing is not None:
        results = replace(results, weighted_run=bench.run(*_restore(names, evaluated), weighing))
    if evaluated is None:  # putting the state back is enough, without what makes samples interact
        results = replace(results, coupling=())
    return replace(record, controls=results)


def _restore(
    names: Sequence[str], evaluated: ControlRun | None = None, *, is_repair: bool = False
) -> list[Intervention]:
    """Restores values before each micro-batch, beside the evaluation mode that removes a part of the difference."""
    what, in_evaluation = "state restored before each micro-batch", list[Intervention]()
    if evaluated is not None:
        # Evaluation mode changes the full batch's gradient as well: in one run alone it would make a difference itself.
        what += f", and with {evaluated.what}"
        in_evaluation = [each for each in evaluated.interventions if each.kind is ControlKind.EVALUATION_MODE]
    changes = DisableCompilation(), RestoreState(tuple(names), is_repair)
    return [*in_evaluation, Intervention(what, ControlKind.STATE_RESTORED, in_reference=False, changes=changes)]


def _repeat(bench: ScriptBench, names: Sequence[str]) -> NextUpdate | None:
    """Restores values in all compared updates; returns the largest difference of a later one, None without one."""
    later = bench.later_updates
    if not later:
        return None
    runs = bench.make_runs(*_restore(names, is_repair=True), updates=later[-1].number)
    differences = [(bench.difference_left(runs, update), bench.rounding_of(update)) for update in later]
    difference_left, rounding = max(differences, key=lambda each: each[0] / each[1])
    return NextUpdate(rounding, difference_left, math.nan)


def _difference_of_state(update: UpdateComparison, evaluated: ControlRun | None) -> float:
    """The difference that is left without other causes: with layers in evaluation mode, or the best weights."""
    if evaluated is not None:
        return evaluated.left
    fit = update.window.fit
    return max(fit.residual, fit.factor_residual) if fit is not None else math.nan


def _explains_more(fit: WeightFit, before: WeightFit | None, tolerance: float) -> bool:
    """Whether weights explain more than without restored state, or one factor explains what took several weights."""
    return before is None or before.residual > tolerance or fit.factor_residual <= tolerance < before.factor_residual


def _with_writers(
    blamed: Sequence[StateChange], seen: Sequence[ChangedValue | CarriedValue]
) -> tuple[StateChange, ...]:
    """Returns the changes with the module that holds each value, and the line that changes it if one was seen."""
    places = {value.name: value.line or (None, None) for value in seen}
    changes = []
    for change in blamed:
        (file, line), owner = places.get(change.name, (None, None)), change.name.rpartition(".")[0] or None
        changes.append(replace(change, writer=Operation("", owner, file=file and display_path(file), line=line)))
    return tuple(changes)
