"""The control for state that forwards change and read again: it is restored before each micro-batch.

State is a module's buffer, frozen parameter or attribute, such as a moving average or a counter.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gaverify.audit.changes import Change, DisableCompilation, RestoreState, UseEvaluationMode, WeightMicroBatches
from gaverify.audit.job import Role
from gaverify.audit.outcome import is_proven
from gaverify.audit.rank_facts import compare_weighed_run, gradient_difference
from gaverify.audit.reading import RecordedRun
from gaverify.audit.recording.state import EVERYTHING
from gaverify.audit.running import Trial
from gaverify.audit.stages import fit_of
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.events import ChangedValue
from gaverify.records.experiment import ControlKind, ControlRun, Operation, WeightFit
from gaverify.records.facts import State, StateChange
from gaverify.records.windows import rounds_of
from gaverify.thresholds import MANY_UNITS
from gaverify.tracebacks import Place
from gaverify.verdict.criteria import floors_allowed

_MOST_ALONE = 6  # values that are restored one by one, each in a run of its own


def control_state(trial: Trial, record: Record) -> Record:
    """Restores state before each micro-batch, if no other fault is proven, and names the values at fault.

    State that causes the whole difference also explains why samples seemed to interact, so that finding is dropped. It
    stays if it is a layer whose evaluation mode removes a part of the difference: the rest is the state's.
    """
    update = record.divergent
    # A single micro-batch follows no other whose state it could read.
    if update is None or update.window.steps < 2 or record.ranks > 1 or trial.is_by_hand or is_proven(record):
        return record
    bench = _StateBench(trial, record, update)
    changed_values, control = bench.restore((EVERYTHING,))
    changes = tuple(StateChange(value.name, value.place) for value in changed_values)
    if not changes or not (control.rounding or control.fit is not None):
        return record
    # attributes last: most of those that change keep an output of the last forward
    one_by_one = sorted(changes, key=lambda change: change.place == "attribute")[:_MOST_ALONE]
    for suspects in [*([change] for change in one_by_one), list(changes)]:
        changed_values, suspect_control = bench.restore(tuple(change.name for change in suspects))
        # where weights explain the rest with all values restored, they may do so with a few of them, too
        if suspect_control.rounding or (suspect_control.fit is not None and not control.rounding):
            lines = {value.name: value.line for value in changed_values}
            blamed = tuple(replace(each, writer=_writer_of(each.name, lines.get(each.name))) for each in suspects)
            is_repair = suspect_control.rounding and not bench.evaluated
            state = State(
                changes,
                suspect_control,
                blamed,
                (suspect_control,) if is_repair else (),
                math.nan if is_repair else bench.difference_of_state,
            )
            results = replace(record.controls, state=state)
            if suspect_control.fit is not None:
                results = replace(results, weighted_run=bench.run_weighted(state, suspect_control.fit))
            if not bench.evaluated:  # putting the state back is enough, without what makes samples interact
                results = replace(results, coupling=())
            return replace(record, controls=results)
    return record


class _StateBench:
    """Runs the script up to the update that differs, with values restored and layers in evaluation mode."""

    def __init__(self, trial: Trial, record: Record, update: UpdateComparison) -> None:
        self._trial, self._record, self._update = trial, record, update
        self.evaluated = self._buffers_to_evaluate()
        # Evaluation mode changes the full batch's gradient as well: in one run alone it would make a difference itself.
        self._full = self._run("full") if self.evaluated else trial.full

    @property
    def _coupling_control(self) -> ControlRun | None:
        """The last control that put layers into evaluation mode; None where that was not the last one."""
        coupling = self._record.controls.coupling
        control = coupling[-1].control if coupling else None
        return control if control is not None and control.kind is ControlKind.EVALUATION_MODE else None

    def _buffers_to_evaluate(self) -> tuple[str, ...]:
        """Returns the buffers of the layers whose evaluation mode removes a part of the difference."""
        control = self._coupling_control
        if control is None:
            return ()
        names = [
            name
            for step in self._trial.full.samples(rounds_of(self._trial.full.events)[0]).steps.values()
            for name in step.buffers
        ]
        return tuple(name for name in names if name.partition(":")[2].rpartition(".")[0] in control.modules)

    def _run(self, role: Role, *changes: Change, source: RecordedRun | None = None) -> RecordedRun:
        evaluation = [UseEvaluationMode(self.evaluated)] if self.evaluated else []
        every_change = (*evaluation, DisableCompilation(), *changes)
        number = self._update.number
        control = self._trial.control(role, *every_change, source=source, updates=number, shown_as="state")
        return self._trial.run(control)

    def run_weighted(self, state: State, fit: WeightFit) -> ControlRun | None:
        """Returns the control with the blamed values restored and the weights that fit then on the losses."""
        shares = self._trial.factors_of_passes(self._record, fit.multipliers)
        names = tuple(change.name for change in state.blamed)
        if not shares:
            return None
        run = self._run("accumulated", RestoreState(names), WeightMicroBatches(shares))
        return compare_weighed_run(self._full, run, self._record)

    @property
    def difference_of_state(self) -> float:
        """The difference that is left without other causes: with layers in evaluation mode, or the best weights."""
        control = self._coupling_control if self.evaluated else None
        if control is not None:
            return control.left
        fit = self._update.window.fit
        return max(fit.residual, fit.factor_residual) if fit is not None else math.nan

    def restore(self, names: tuple[str, ...]) -> tuple[tuple[ChangedValue, ...], ControlRun]:
        """Restores values before each micro-batch.

        Returns:
            All values that forwards change, and the control; it has the weights that explain the rest, if any do.
        """
        run = self._run("accumulated", RestoreState(names), source=self._full)
        unit, number, tolerance = self._record.unit, self._update.number, self._record.tolerance
        difference = gradient_difference(self._full, run, update=number)
        is_rounding = difference <= max(MANY_UNITS * unit, floors_allowed(unit) * self._update.noise)
        fit = None
        if not is_rounding and not self.evaluated:
            round_ = rounds_of(run.events)[number - 1]
            fit = fit_of(self._full.samples(round_), run.samples(round_))
            fit = fit if fit is not None and _explains_more(fit, self._update.window.fit, tolerance) else None
        what = "state restored before each micro-batch"
        coupling_control = self._coupling_control if self.evaluated else None
        if coupling_control is not None:
            what += f", and with {coupling_control.what}"
        control = ControlRun(what, difference, is_rounding, fit, ControlKind.STATE_RESTORED)
        return run.closing.control.changed_values, control


def _explains_more(fit: WeightFit, before: WeightFit | None, tolerance: float) -> bool:
    """Whether weights explain more than without restored state, or one factor explains what took several weights."""
    if fit.vacuous or fit.residual > tolerance:
        return False
    return before is None or before.residual > tolerance or fit.factor_residual <= tolerance < before.factor_residual


def _writer_of(name: str, place: Place | None) -> Operation:
    """Returns the module that holds a value, and the line that changes it if one was seen."""
    file, line = place or (None, None)
    return Operation("", name.rpartition(".")[0] or None, file=file, line=line)
