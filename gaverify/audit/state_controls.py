"""The control for state that forwards move and read: the accumulated run with it put back before each micro-batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gaverify.audit.changes import Change, DisableCompilation, FreezeBuffers, RestoreState, WeightMicroBatches
from gaverify.audit.job import Role
from gaverify.audit.outcome import is_proven
from gaverify.audit.rank_facts import compare_weighed_run, gradient_difference
from gaverify.audit.reading import RecordedRun
from gaverify.audit.recording.state import EVERYTHING
from gaverify.audit.running import Trial
from gaverify.audit.stages import fit_of
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.experiment import ControlKind, ControlRun, Operation, WeightFit
from gaverify.records.facts import State, StateChange
from gaverify.records.windows import rounds_of
from gaverify.thresholds import MANY_UNITS
from gaverify.verdict.criteria import floors_allowed

_MOST_ALONE = 6  # values that are put back one by one, each in a run of its own


def control_state(trial: Trial, record: Record) -> Record:
    """Returns the record with the values that are read after they were moved, where these make the difference.

    Asked for where no other fault is proven. What samples seemed to do to each other is then no cause, unless it is a
    layer whose evaluation mode removes a part of the difference: that part is its own.
    """
    update = record.divergent
    if update is None or update.backwards < 2 or record.ranks > 1 or trial.is_by_hand or is_proven(record):
        return record
    bench = _Bench(trial, record, update)
    moving, control = bench.put_back((EVERYTHING,))
    changes = tuple(StateChange(name, place) for name, place, _ in moving)
    if not changes or not (control.rounding or control.fit is not None):
        return record
    # attributes last: most that change hold what the last forward gave
    one_by_one = sorted(changes, key=lambda change: change.place == "attribute")[:_MOST_ALONE]
    for suspects in [*([change] for change in one_by_one), list(changes)]:
        moving, suspect_control = bench.put_back(tuple(change.name for change in suspects))
        if suspect_control.rounding or (suspect_control.fit is not None and not control.rounding):
            places = {name: place for name, _, place in moving}
            blamed = tuple(replace(each, writer=_writer(each.name, places.get(each.name))) for each in suspects)
            is_repair = suspect_control.rounding and not bench.frozen
            state = State(
                changes,
                suspect_control,
                blamed,
                (suspect_control,) if is_repair else (),
                math.nan if is_repair else bench.alone,
            )
            weighed = record.weighed if suspect_control.fit is None else bench.weigh(state, suspect_control.fit)
            return replace(record, state=state, coupling=record.coupling if bench.frozen else (), weighed=weighed)
    return record


class _Bench:
    """Runs the script up to the update that differs, with values put back and layers in evaluation mode."""

    def __init__(self, trial: Trial, record: Record, update: UpdateComparison) -> None:
        self._trial, self._record, self._update = trial, record, update
        self.frozen = self._frozen_layers()
        self._full = self._again("full") if self.frozen else trial.full

    def _frozen_layers(self) -> tuple[str, ...]:
        """The buffers of layers whose evaluation mode removes a part of the difference and not all of it."""
        control = self._record.coupling[-1].control if self._record.coupling else None
        if control is None or control.kind is not ControlKind.FROZEN:
            return ()
        names = [
            name
            for step in self._trial.full.samples(rounds_of(self._trial.full.events)[0]).steps.values()
            for name in step.get("buffers", {})
        ]
        return tuple(name for name in names if name.partition(":")[2].rpartition(".")[0] in control.modules)

    def _again(self, role: Role, *changes: Change, source: RecordedRun | None = None) -> RecordedRun:
        frozen = [FreezeBuffers(self.frozen)] if self.frozen else []
        every_change = (*frozen, DisableCompilation(), *changes)
        number = self._update.number
        control = self._trial.control(role, *every_change, source=source, updates=number, shown_as="state")
        return self._trial.run(control)

    def weigh(self, state: State, fit: WeightFit) -> ControlRun | None:
        """Returns what is left with the blamed values put back and the losses times the weights that fit then."""
        shares = self._trial.shares(self._record, fit.multipliers)
        names = tuple(change.name for change in state.blamed)
        if not shares:
            return None
        run = self._again("accumulated", RestoreState(names), WeightMicroBatches(shares))
        return compare_weighed_run(self._full, run, self._record)

    @property
    def alone(self) -> float:
        """What the state makes with the other causes neutralised: layers in evaluation mode, or the best weights."""
        control = self._record.coupling[-1].control if self.frozen else None
        if control is not None:
            return control.left
        fit = self._update.fit
        return max(fit.residual, fit.factor_residual) if fit is not None else math.nan

    def put_back(self, names: tuple[str, ...]) -> tuple[list[Any], ControlRun]:
        """Returns what forwards were seen to move, and what is left, or the weights that explain it."""
        run = self._again("accumulated", RestoreState(names), source=self._full)
        unit, number, tolerance = self._record.unit, self._update.number, self._record.tolerance
        left = gradient_difference(self._full, run, update=number)
        is_rounding = left <= max(MANY_UNITS * unit, floors_allowed(unit) * self._update.noise)
        fit = None
        if not is_rounding and not self.frozen:
            round_ = rounds_of(run.events)[number - 1]
            fit = fit_of(self._full.samples(round_), run.samples(round_))
            fit = fit if fit is not None and _explains_more(fit, self._update.fit, tolerance) else None
        what = "state restored before each micro-batch"
        beside = self._record.coupling[-1].control if self.frozen else None
        if beside is not None:
            what += f", and with {beside.what}"
        return run.meta["moving"], ControlRun(what, left, is_rounding, fit, ControlKind.STATE_RESTORED)


def _explains_more(fit: WeightFit, before: WeightFit | None, tolerance: float) -> bool:
    """Whether weights explain what they did not with the state moving, or one factor what took several weights."""
    if fit.vacuous or fit.residual > tolerance:
        return False
    return before is None or before.residual > tolerance or fit.factor_residual <= tolerance < before.factor_residual


def _writer(name: str, place: Any) -> Operation:
    """The module that holds a value, and the line that moves it where one was seen."""
    file, line = place or (None, None)
    return Operation("", name.rpartition(".")[0] or None, file=file, line=line)
