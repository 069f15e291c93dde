"""The control for state that forwards move and read: the accumulated run with it put back before each micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gaverify.audit.job import EVERYTHING
from gaverify.audit.outcome import is_proven
from gaverify.audit.rank_facts import left_by
from gaverify.audit.reading import Run
from gaverify.audit.running import Trial
from gaverify.audit.stages import fit_of
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.experiment import ControlKind, ControlRun, Operation, WeightFit
from gaverify.records.facts import State, StateChange
from gaverify.records.windows import rounds_of
from gaverify.thresholds import MANY_UNITS
from gaverify.verdict.criteria import floors_allowed

_MOST_ALONE = 6  # values that are put back one by one, each in a run of its own


def restored(trial: Trial, record: Record) -> Record:
    """Returns the record with the values that are read after they were moved, where these make the difference.

    Asked for where no other fault is proven. What samples seemed to do to each other is then no cause.
    """
    update = record.divergent
    if update is None or update.backwards < 2 or record.ranks > 1 or trial.options.get("by_hand") or is_proven(record):
        return record
    run = _run(trial, update, (EVERYTHING,))
    changes = tuple(StateChange(name, place) for name, place, _ in run.meta["moving"])
    control = _control(trial.full, run, record, update)
    if not changes or not (control.rounding or control.fit is not None):
        return record
    # attributes last: most that change hold what the last forward gave
    one_by_one = sorted(changes, key=lambda change: change.place == "attribute")[:_MOST_ALONE]
    for suspects in [*([change] for change in one_by_one), list(changes)]:
        run = _run(trial, update, tuple(change.name for change in suspects))
        found = _control(trial.full, run, record, update)
        if found.rounding or (found.fit is not None and not control.rounding):
            places: dict[str, Any] = {name: place for name, _, place in run.meta["moving"]}
            blamed = tuple(replace(each, writer=_writer(each.name, places.get(each.name))) for each in suspects)
            remedies = (found,) if found.rounding else ()
            return replace(record, state=State(changes, found, blamed, remedies), coupling=())
    return record


def _run(trial: Trial, update: UpdateComparison, names: tuple[str, ...]) -> Run:
    return trial.again("accumulated", restored=names, updates=update.number, eager=True, shown_as="state")


def _control(full: Run, run: Run, record: Record, update: UpdateComparison) -> ControlRun:
    """What is left, or the weights that explain it where they explained nothing before."""
    left = left_by(full, run, update=update.number)
    is_rounding = left <= max(MANY_UNITS * record.unit, floors_allowed(record.unit) * update.noise)
    fit = None
    if not is_rounding:
        round_ = rounds_of(run.events)[update.number - 1]
        fit = fit_of(full.samples(round_), run.samples(round_))
        fit = fit if fit is not None and _explains_more(fit, update.fit, record.tolerance) else None
    return ControlRun("state restored before each micro-batch", left, is_rounding, fit, ControlKind.STATE_RESTORED)


def _explains_more(fit: WeightFit, before: WeightFit | None, tolerance: float) -> bool:
    """Whether weights explain what they did not with the state moving, or one factor what took several weights."""
    if fit.vacuous or fit.residual > tolerance:
        return False
    return before is None or before.residual > tolerance or fit.factor_residual <= tolerance < before.factor_residual


def _writer(name: str, place: Any) -> Operation:
    """The module that holds a value, and the line that moves it where one was seen."""
    file, line = place or (None, None)
    return Operation("", name.rpartition(".")[0] or None, file=file, line=line)
