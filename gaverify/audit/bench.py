"""Control runs of a script: both runs again, with something changed on purpose.

`gaverify.search.bench` makes those of a process. Both are told as `Intervention`s what is changed, and answer what
difference is left, and whether that shows anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from gaverify.audit.job import Change, Changes, PinModules, ReplayData, Run, WeightMicroBatches, merge_changes
from gaverify.audit.reading import ParameterPlace, RecordedRun, labels
from gaverify.audit.recording.outputs import PinnedCalls
from gaverify.audit.running import Trial
from gaverify.audit.stages import fit_of
from gaverify.errors import GaverifyError
from gaverify.records.audit import Record, Stage, UpdateComparison
from gaverify.records.experiment import ControlKind, ControlRun, WeightFit
from gaverify.records.outcomes import Outcome
from gaverify.rules.rule import join_texts
from gaverify.search.bench import ControlFailed, Intervention
from gaverify.thresholds import COMPUTED_FLOAT32, MANY_UNITS, SMALL_PART
from gaverify.verdict.comparison import left_between
from gaverify.verdict.criteria import floors_allowed

T = TypeVar("T")


@dataclass(frozen=True)
class ControlledRuns:
    """Both runs of a control, and what was changed in them."""

    interventions: tuple[Intervention, ...]
    """The changes; the last one names the control."""
    full: RecordedRun
    """The full-batch run; the audit's own where it was not changed."""
    accumulated: RecordedRun
    """The accumulated run, which follows it."""


class ScriptBench:
    """Runs a script again up to an update, with something changed, and compares the gradients of that update.

    Args:
        trial: The runs that were compared.
        record: The facts of these runs.
        update: The gradients of this update are compared.
        shown_as: How the report calls the runs; empty: like the trial's.
        watch: Changes of all runs that only record more, and alter no gradient.
        summed: Compare gradients as the last backward pass left them; None: at the stage that decided the update.
    """

    def __init__(
        self,
        trial: Trial,
        record: Record,
        update: UpdateComparison,
        shown_as: str = "",
        watch: Changes = (),
        *,
        summed: bool | None = None,
    ) -> None:
        self.trial, self.record, self.update = trial, record, update
        self._shown_as, self._watch = shown_as, watch
        self._summed = summed
        # by what they do otherwise: no run is made twice
        self._full_runs: dict[tuple[Changes, int], RecordedRun] = {}
        self._accumulated_runs: dict[tuple[Changes, Changes, int], RecordedRun] = {}

    def attempt(self, name: str, ask: Callable[[], T]) -> T | None:
        """Returns what `ask` finds; None where a changed run failed, which is noted."""
        try:
            return ask()
        except GaverifyError as error:
            self.trial.failures[name] = str(error).splitlines()[0]
            return None

    def run(self, *interventions: Intervention, fit: bool = False) -> ControlRun:
        """Makes both runs with something changed; says what difference is left, and whether that shows anything.

        Args:
            interventions: The changes; the last one names the control.
            fit: Whether to look for weights that explain what is left.

        Raises:
            ControlFailed: An intervention cannot be made in a script.
            ProblemError: A changed run failed.
        """
        return self.compare(self.make_runs(*interventions), fit=fit)

    def make_runs(
        self, *interventions: Intervention, watch: Changes = (), updates: int | None = None
    ) -> ControlledRuns:
        """Makes both runs with something changed; of a repair the accumulated one alone.

        Args:
            interventions: The changes.
            watch: Changes of both that only record more.
            updates: Updates to record; None: up to the one that is compared.
        """
        in_both, number = self._changes_of(interventions, watch), updates or self.update.number
        changes = merge_changes(in_both, *(each.changes for each in interventions if not each.in_reference))
        full_run, key = self._full_runs.get((in_both, number)), (in_both, changes, number)
        if key in self._accumulated_runs:
            return ControlledRuns(interventions, full_run or self.trial.full, self._accumulated_runs[key])
        if in_both and full_run is None and self._can_run_side_by_side(interventions):
            full, accumulated = self.trial.runner.record(
                self._plan_full(in_both, number), self._plan_accumulated(self.trial.full, changes, number)
            )
            self._full_runs[in_both, number] = full
        else:
            full = self.make_full_run(*interventions, watch=watch, updates=updates)
            accumulated = self.trial.run(self._plan_accumulated(full, changes, number))
        self._accumulated_runs[key] = accumulated
        return ControlledRuns(interventions, full, accumulated)

    def make_full_run(
        self, *interventions: Intervention, watch: Changes = (), updates: int | None = None
    ) -> RecordedRun:
        """Makes the full-batch run alone, once for the same changes; without any it is the trial's.

        Args:
            interventions: The changes.
            watch: Changes that only record more.
            updates: Updates to record; None: up to the one that is compared.
        """
        changes, number = self._changes_of(interventions, watch), updates or self.update.number
        if not changes:
            return self.trial.full
        if (changes, number) not in self._full_runs:
            self._full_runs[changes, number] = self.trial.run(self._plan_full(changes, number))
        return self._full_runs[changes, number]

    def _changes_of(self, interventions: Sequence[Intervention], watch: Changes) -> Changes:
        """Returns what the full-batch run does otherwise."""
        for each in interventions:
            if not each.changes:
                raise ControlFailed(f"no run of a script can be made with {each.what}")
        return merge_changes(self._watch, *(each.changes for each in interventions if each.in_reference), watch)

    def _plan_full(self, changes: Sequence[Change], updates: int) -> Run:
        return self.trial.control("full", *changes, updates=updates, shown_as=self._shown_as)

    def _plan_accumulated(self, full: RecordedRun, changes: Sequence[Change], updates: int) -> Run:
        return self.trial.control("accumulated", *changes, source=full, updates=updates, shown_as=self._shown_as)

    def _can_run_side_by_side(self, interventions: Sequence[Intervention]) -> bool:
        """Whether the accumulated run may follow the trial's full-batch run, and need not wait for another one."""
        closing = self.trial.full.closing
        # Without a seed, full-batch runs differ in draws and samples, and each needs an accumulated run of its own.
        is_given_data = closing.draws.count or any(isinstance(change, ReplayData) for change in self.trial.changes)
        # Later updates begin with the weights of the full-batch run, which other kernels may round differently.
        is_first = self.update.number == 1 and not closing.unseen.has_compiled
        # Values that replace those of micro-batches come from a full-batch run with the same changes.
        is_changed = any(each.in_reference for each in interventions)
        return is_first and not is_given_data and not is_changed

    def compare(self, runs: ControlledRuns, *, fit: bool = False) -> ControlRun:
        """Returns what difference is left between the runs of a control, and whether that shows anything.

        Parameters that the own code of pinned modules reads are left out. Their gradients are explained where the
        blamed values of that code differed: the same code computes both.

        Args:
            runs: The runs.
            fit: Whether to look for weights that explain what is left.
        """
        last, names = runs.interventions[-1], labels(runs.full, runs.accumulated)
        what = last.what
        left_out, differed = self._read_pins(runs)
        own_names = [names[place] for place in sorted(left_out)]
        if own_names:
            what += f" (except its own {join_texts([f'`{name}`' for name in own_names], 1)})"
        divergent = {row.name for row in self.update.parameters if row.outcome is Outcome.DIVERGENT}
        cut_off = set(own_names) & divergent if differed is False else set[str]()
        if any(each.in_reference for each in runs.interventions):
            connected = {*self._find_connected(runs.full), *self._find_connected(runs.accumulated)}
            cut_off |= divergent - {names.get(place) for place in connected}
        difference_left = self.difference_left(runs, left_out=left_out)
        allowed = self.record.tolerance if last.kind is ControlKind.WEIGHTS else self.rounding_of(self.update)
        is_rounding = difference_left <= allowed
        return ControlRun(
            what,
            difference_left,
            is_rounding,
            self._fit(runs) if fit and not is_rounding else None,
            last.kind,
            values_differed=differed,
            cut_off=tuple(sorted(cut_off)),
            modules=last.modules,
            interventions=runs.interventions,
        )

    def difference_left(
        self, runs: ControlledRuns, update: UpdateComparison | None = None, left_out: Collection[ParameterPlace] = ()
    ) -> float:
        """Returns ‖accumulated − full‖ / ‖full‖ of an update's gradients; NaN where there are none.

        Args:
            runs: The runs.
            update: The update; None: that of the bench.
            left_out: Parameters that are not compared.
        """
        update = update or self.update
        round_ = self.trial.rounds[update.number - 1]
        full, accumulated = (
            {str(place): gradient for place, gradient in gradients.items() if place not in left_out}
            for run in (runs.full, runs.accumulated)
            for gradients in [run.gradients(round_, summed=self._is_summed(update))]
        )
        return left_between({name: accumulated.get(name) for name in full}, full) if full else math.nan

    def _is_summed(self, update: UpdateComparison) -> bool:
        return update.decided is Stage.SUMMED if self._summed is None else self._summed

    def rounding_of(self, update: UpdateComparison) -> float:
        """Returns the relative difference of an update's gradients that rounding explains."""
        return max(MANY_UNITS * self.record.unit, floors_allowed(self.record.unit) * update.noise)

    @property
    def later_updates(self) -> list[UpdateComparison]:
        """The updates behind that of the bench in which a difference means something."""
        return [each for each in self.record.updates if each.judged and each.number > self.update.number]

    def weigh(self, weights: Sequence[float]) -> Intervention | None:
        """Returns the repair that gives the micro-batches other weights; None where a run cannot be given them."""
        # The weights of several ranks' passes stand side by side, and no run multiplies by those of each rank.
        factors = self.trial.factors_of_passes(self.record, weights) if self.record.ranks == 1 else ()
        if not factors:
            return None
        what, change = "each loss weighted correctly", WeightMicroBatches(factors)
        return Intervention(what, ControlKind.WEIGHTS, in_reference=False, changes=(change,))

    def _find_connected(self, run: RecordedRun) -> list[ParameterPlace]:
        """The parameters that got a gradient in the update."""
        round_ = self.trial.rounds[self.update.number - 1]
        gradients = run.gradients(round_, summed=self._is_summed(self.update))
        return [place for place, gradient in gradients.items() if bool(gradient.any())]

    def _read_pins(self, runs: ControlledRuns) -> tuple[set[ParameterPlace], bool | None]:
        """Returns the parameters that pinned code itself reads, and whether the values that are blamed had differed."""
        file = runs.accumulated.folder / "pinned.pt"
        pins = next((change for change in runs.interventions[-1].changes if isinstance(change, PinModules)), None)
        if not file.exists():
            return set(), runs.accumulated.closing.control.values_differed
        pinned: PinnedCalls = torch.load(file, weights_only=True)
        left_out = {(optimizer, at) for optimizer, positions in pinned["own"].items() for at in positions}
        return left_out, None if pins is None else not set(pins.paths).isdisjoint(pinned[pins.blamed])

    def _fit(self, runs: ControlledRuns) -> WeightFit | None:
        """Returns the weights that explain what is left; None where none do."""
        round_ = self.trial.rounds[self.update.number - 1]
        fit = fit_of(runs.full.samples(round_), runs.accumulated.samples(round_), summed=self._is_summed(self.update))
        return fit if fit is not None and not fit.vacuous and fit.residual <= self.record.tolerance else None


def difference_allowed(unit: float) -> float:
    """Returns the largest relative difference of rows that count as equal."""
    return max(COMPUTED_FLOAT32, MANY_UNITS * unit)


def explained_share(control: ControlRun, difference: float) -> float:
    """The share of the difference that pins remove; if that is small, the share that they and weights remove."""
    share = 1 - control.left / difference
    return 1 - control.fit.residual / difference if control.fit is not None and share <= SMALL_PART else share
