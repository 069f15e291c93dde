"""Frozen records of an audit: names and numbers, no tensors, no torch; rules read and reports show them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from gaverify.records.events import Forward, Ledger
from gaverify.records.experiment import Cause, ControlRun, DifferenceKind, FirstDifference, LossTerm, WeightFit
from gaverify.records.json_objects import JsonRecord
from gaverify.records.numbers import Number
from gaverify.records.outcomes import Outcome, ParameterComparison, relative_total, resolution_of
from gaverify.records.ranks import RankFacts
from gaverify.records.windows import AccumulationWindow, E, Window
from gaverify.thresholds import COMPUTED_FLOAT32, FEW_UNITS, U32

if TYPE_CHECKING:
    from gaverify.records.comparison import State


# The three places at which an update is compared, and what stood between them: clipping, settings, a step.


class Stage(str, Enum):
    """Where an update is looked at; the values are what JSON prints."""

    SUMMED = "summed"
    """The gradient as the window's last backward pass left it, before clipping or the script's own hand changed it."""

    USED = "used"
    """The gradient that the optimizer saw."""

    UNCLIPPED = "unclipped"
    """The same in a control whose losses are so small that nothing is clipped."""

    CHANGE = "change"
    """The change of the weights by steps that both started from the same weights, with the same gradient or without."""


@dataclass(frozen=True)
class StageComparison(JsonRecord):
    """How far both runs are apart at one stage."""

    stage: Stage
    """The stage."""
    outcome: Outcome
    """Outcome of all parameters there."""
    relative_difference: Number
    """‖accumulated − full‖ / ‖full‖ over all parameters together."""
    norm_ratio: Number
    """‖accumulated‖ / ‖full‖; NaN where the latter is zero."""


@dataclass(frozen=True)
class Clip(JsonRecord):
    """One clipping after the window's last backward pass."""

    call: str
    """Name of the function that clips."""
    active: bool
    """Whether it changed a gradient."""
    norm: Number = math.nan
    """Norm that it measured; NaN where not known."""
    limit: Number = math.nan
    """Largest norm, or value, that it lets through; NaN where not known."""
    after_step: bool = False
    """Whether it was called after the optimizer's step, where it changes nothing that is used."""


@dataclass(frozen=True)
class SettingDifference(JsonRecord):
    """A number of an optimizer that differs between the runs when the same update is made."""

    optimizer: int
    """Number of the optimizer, from 0 in the order in which they were made."""
    group: int
    """Number of its parameter group, from 0."""
    name: str
    """Name of the setting, such as "lr" or "steps counted"."""
    full: Number
    """Value in the full-batch run."""
    accumulated: Number
    """Value in the accumulated run."""
    rank: int = 0
    """Rank of the process that has it."""


# The recorded and compared updates of an audit: names and numbers, which rules read and reports show.


@dataclass(frozen=True)
class RowCheck(JsonRecord):
    """The rows that the forwards of a window were fed in both runs."""

    full: int
    """Number of rows that the full-batch run was fed."""
    accumulated: int
    """Number of rows that the accumulated run was fed."""
    differing: int = 0
    """Number of rows without a counterpart in the other run, in the input tensor where that is most."""
    path: str = ""
    """Name of that tensor among the inputs, such as "argument 1"."""
    padded: bool = False
    """Whether some rows agree only without their padding."""
    checked: bool = True
    """Whether the rows could be compared; else only their numbers are known."""
    adds_nothing: bool = False
    """Whether the rows that the accumulated run was not fed add nothing to the full batch's gradient."""

    @property
    def same(self) -> bool:
        """Whether the samples are the same, as far as could be checked."""
        return self.differing == 0

    @property
    def is_comparable(self) -> bool:
        """Whether both gradients are of the same samples: of rows without targets there is none."""
        return self.same or self.adds_nothing

    @property
    def missing(self) -> int:
        """The rows of the full batch that the accumulated run was not fed."""
        # Rows beyond the full batch's number differ as well, but none of them is missing.
        return self.differing - max(self.accumulated - self.full, 0)

    @property
    def is_part(self) -> bool:
        """Whether the accumulated run was fed some of the full batch's samples and no others."""
        return 0 < self.accumulated < self.full and self.differing == self.full - self.accumulated


@dataclass(frozen=True)
class StepComparison(JsonRecord):
    """How the optimizers of both runs used the gradients of one update, and with which settings."""

    learning_rates: tuple[Number, ...] = ()
    """Learning rate of each parameter group that the accumulated run stepped."""
    learning_rates_full: tuple[Number, ...] = ()
    """Learning rate of each parameter group that the full-batch run stepped."""
    weights_difference: Number = math.nan
    """Relative difference of sampled weights after the update; NaN if stepped with the full batch's gradient."""
    drifted: tuple[str, ...] = ()
    """Names of buffers that differ by more than rounding after the update."""
    clips: tuple[Clip, ...] = ()
    """Clippings of the accumulated run after its last backward pass."""
    clips_full: tuple[Clip, ...] = ()
    """Clippings of the full-batch run after its last backward pass."""
    settings: tuple[SettingDifference, ...] = ()
    """Optimizer numbers that differ between the runs, of the first such rank; empty where the update is not judged."""
    takes_factor: bool = False
    """Whether a control showed that the step cancels a factor of the gradient, so that the weights agree."""
    may_take_factor: bool = False
    """Whether a step of the script's own may divide: it hides the gradient's size, or moves weights otherwise."""


@dataclass(frozen=True)
class UpdateComparison(JsonRecord):
    """One optimizer update, compared between the full-batch run and the accumulated run."""

    written = ("relative_difference", "norm_ratio", "resolution")

    number: int
    """Number of the update, counted from 1."""
    outcome: Outcome
    """Outcome of all parameters; inconclusive if the full-batch run does not repeat itself or no stage decides."""
    judged: bool
    """Whether a difference has a meaning: samples and starting weights agree, and the full-batch run repeats itself."""
    parameters: tuple[ParameterComparison, ...]
    """Comparison of each parameter's gradient, at the stage in `decided`."""
    data: RowCheck
    """Comparison of the samples that both runs were fed for this update."""
    window: AccumulationWindow = field(default_factory=AccumulationWindow)
    """The accumulated run's micro-batches, with the weights that give the full batch's gradient at that stage."""
    step: StepComparison = field(default_factory=StepComparison)
    """Comparison of what the optimizers did with the gradients."""
    started_apart: Number = 0.0
    """Relative difference of the sampled weights before the update; NaN where no weights could be compared."""
    noise: Number = 0.0
    """Noise floor: relative difference between the gradients of repeated full-batch runs."""
    unrepeatable: str = ""
    """How the full-batch run differs from a repetition by more than rounding; empty where it does not."""
    decided: Stage = Stage.USED
    """Stage at which `parameters`, `outcome` and the window's fit were measured."""
    unclear: bool = False
    """Whether both runs changed summed gradients by hand, so that no stage shows which one is right."""
    stages: tuple[StageComparison, ...] = ()
    """Difference and norm ratio at each stage that was compared."""
    fed: RowCheck | None = None
    """Samples of all forwards, also those without a backward; None where samples agree or several ranks train."""
    never_fed: int = 0
    """Number of full-batch samples that the accumulated run was fed neither in this update nor in the next."""

    @property
    def differs(self) -> bool:
        """Whether the gradients differ where a difference means something."""
        return self.judged and self.outcome is Outcome.DIVERGENT

    @property
    def differs_after_passes(self) -> bool:
        """Whether the last backward pass left the same gradients in both runs, and the optimizers saw others."""
        by_stage = {stage.stage: stage for stage in self.stages}
        summed, used = by_stage.get(Stage.SUMMED), by_stage.get(Stage.USED)
        if summed is None or used is None or not self.differs:
            return False
        # the ratio is not known where `.grad` is zero because the script keeps its sums elsewhere
        is_known = summed.outcome is Outcome.EQUIVALENT and summed.norm_ratio > 0.0
        return is_known and used.outcome is Outcome.DIVERGENT

    @property
    def other_step(self) -> bool:
        """Whether the gradients differ, and the step makes something else of the same gradients as well."""
        # At this stage both runs step with the same gradient, so that only the step itself can differ.
        changed = any(stage.stage is Stage.CHANGE and stage.outcome is Outcome.DIVERGENT for stage in self.stages)
        return self.differs and changed

    @property
    def is_zero_in_both(self) -> bool:
        """Whether every gradient is exactly zero in both runs: a script that skips an update may clear them before."""
        return self.judged and all(row.reference_norm == 0 == row.accumulated_norm for row in self.parameters)

    @property
    def largest(self) -> ParameterComparison | None:
        """The parameter with the largest finite relative difference among the worst outcomes."""
        rows = [row for row in self.parameters if math.isfinite(row.relative_difference)]
        divergent = [row for row in rows if row.outcome is Outcome.DIVERGENT]
        return max(divergent or rows, key=lambda row: row.relative_difference, default=None)

    @property
    def relative_difference(self) -> Number:
        """‖accumulated − full‖ / ‖full‖ over all parameters together."""
        return relative_total((row.difference_norm, row.reference_norm) for row in self.parameters)

    @property
    def norm_ratio(self) -> Number:
        """‖accumulated‖ / ‖full‖ over all parameters together."""
        ratio = relative_total((row.accumulated_norm, row.reference_norm) for row in self.parameters)
        # A full batch whose gradient is zero has no ratio.
        return ratio if math.isfinite(ratio) else math.nan

    @property
    def resolution(self) -> Number:
        """The smallest relative difference that could have been seen in the least clear parameter; NaN in none."""
        return resolution_of(self.parameters)


@dataclass(frozen=True)
class Overwritten:
    """A control in which gradients were cleared before every backward pass, and the step used the same ones."""

    difference_left: float
    """Relative difference of both steps' gradients."""
    file: str | None = None
    """File of the line that sets the gradients; None where not known."""
    line: int | None = None
    """That line."""


@dataclass(frozen=True)
class TransformedGradients:
    """A control in which losses counted more: it shows gradients that each micro-batch transforms before the sum."""

    parameters: tuple[str, ...]
    """Names of the parameters whose gradients are transformed."""
    times: float
    """Factor on the losses in the control."""
    responses: tuple[float, ...]
    """By which factor each of these gradients grew then; `times` for a gradient that nothing transforms."""
    sums_difference: float
    """Relative difference of the backward passes' sum from the full batch's gradient; NaN if not measured."""
    halves_difference: float
    """How far two halves of the window are from adding up, relative to their norms."""
    all_of_it: bool
    """Whether no other parameter differs."""


@dataclass(frozen=True)
class ControlResults:
    """Results of an audit's control runs; each is made only where what was known before left a question."""

    steps_undone: WeightFit | None = None
    """Fit over micro-batches that all ran at the same weights, each step undone; None if that control did not run."""
    overwritten: Overwritten | None = None
    """Control showing that each backward pass overwrites the gradients; None where none showed it."""
    unclipped: tuple[UpdateComparison, ...] = ()
    """Updates of the control whose losses are too small to be clipped; empty if that control did not run."""
    terms: tuple[LossTerm, ...] = ()
    """Terms of the loss of the first update that differs; empty where they were not tried or do not add up."""
    coupling: tuple[Cause, ...] = ()
    """Places in modules or in the loss where samples interact, with their control runs; empty where none was found."""
    backward: Cause | None = None
    """Code whose backward depends on the batch although the forwards agree; None where none was found."""
    transformed: TransformedGradients | None = None
    """Parameters whose gradients each micro-batch transforms before they are summed; None where none was found."""
    state: State | None = None
    """Values that forwards change and read again, where restoring them before each micro-batch helped; else None."""
    weighted_run: ControlRun | None = None
    """Accumulated run with its losses multiplied by the fitted weights; None if that control did not run."""
    loss_line: tuple[str, int] | None = None
    """File and line that computed the reweighted loss, where a framework's loop differentiates it; else None."""
    first_difference: FirstDifference | None = None
    """Where the two runs differ first; None where they were not traced, or nothing comparable differs."""


@dataclass(frozen=True)
class Calls:
    """The calls of a script, window by window, and K as far as it is told; a run of a model has none."""

    windows: tuple[Window, ...] = ()
    """Accumulation windows of the accumulated run, or of the only run."""
    ledger: Ledger = field(default_factory=lambda: Ledger((), ()))
    """Whether each backward pass of that run reached a step."""
    full_windows: tuple[Window, ...] = ()
    """Windows of the full-batch run; empty if only calls were checked."""
    full_ledger: Ledger = field(default_factory=lambda: Ledger((), ()))
    """Whether each backward pass of the full-batch run reached a step."""
    rank_windows: tuple[tuple[Window, ...], ...] = ()
    """Windows of ranks 1, 2, … of the accumulated run; empty unless the audit saw all ranks."""
    steps: int | None = None
    """K, the number of micro-batches per update, as the user gave it; None where not given."""
    numbers: tuple[int, ...] = ()
    """Integers among the arguments of the accumulated run; usually one of them is K."""
    skipped_alike: frozenset[int] = frozenset()
    """Numbers of windows in which both runs discard the gradients of the same samples: skipped updates."""

    @property
    def complete(self) -> tuple[Window, ...]:
        """The windows that ended with a step."""
        return tuple(window for window in self.windows if window.complete)

    @property
    def first(self) -> Window | None:
        """The first window."""
        return self.complete[0] if self.complete else None

    def expected_passes(self, window: Window | None) -> int | None:
        """How many backward passes the window should have, as far as it is known.

        The user's K; else as many as feed the rows that the full-batch run used for this update.
        """
        if self.steps is not None:
            return self.steps
        full_window = next((full for full in self.full_windows if window and full.number == window.number), None)
        if full_window is None or window is None or not full_window.backwards or not window.backwards:
            return None
        rows, window_rows = full_window.rows, window.rows
        if full_window.reached_rows is not None and full_window.reached_rows < rows:
            rows, window_rows = full_window.reached_rows, window.reached_rows or 0  # other forwards beside the training
        if not rows or not window_rows:
            return None
        if full_window.backwards > min(
            full.backwards for full in self.full_windows if full.optimizers == full_window.optimizers
        ):
            return None  # the full batch's own window is longer than its others: it tells nothing about K
        # Rounded, because the last micro-batch may be shorter than the others.
        return max(1, round(window.backwards * rows / window_rows))

    def window_of(self, number: int | None) -> Window | None:
        """The window of an update."""
        return next((window for window in self.windows if window.number == number), None)

    def usual(self, window: Window | None) -> int:
        """The backward passes that most windows of the same optimizers have; of equally frequent counts the largest."""
        alike = (similar for similar in self.complete if window is not None and similar.optimizers == window.optimizers)
        counts = Counter(similar.backwards for similar in alike)
        return max(counts, key=lambda count: (counts[count], count), default=0)

    def inside(self, kind: type[E]) -> list[E]:
        """The events of a kind strictly inside windows, unless the full batch's run has such in the same window."""
        # A call that the full-batch run makes inside its window as well is no fault of accumulation.
        ordinary = {
            full.number
            for full in self.full_windows
            if any(isinstance(event, kind) for event in full.before_last_backward)
        }
        return [
            event
            for window in self.windows
            if window.number not in ordinary
            for event in window.before_last_backward
            if isinstance(event, kind)
        ]


@dataclass(frozen=True)
class Record:
    """Everything that the rules read: calls of the audited runs, their comparison and the results of controls."""

    calls: Calls = field(default_factory=Calls)
    """Calls of the accumulated run, or of the only run, and of the full-batch run."""
    updates: tuple[UpdateComparison, ...] = ()
    """Comparison of each update; empty if only calls were checked."""
    controls: ControlResults = field(default_factory=ControlResults)
    """Results of the control runs."""
    unit: float = U32
    """Unit roundoff of the coarsest arithmetic of the full-batch run."""
    dealt: int = 0
    """Number of the full batch's random draws that the accumulated run reused sample by sample; 0 for none."""
    unaligned: Mapping[str, str] = field(default_factory=dict)
    """Random draws that could not be reused, with the reason."""
    ranks: int = 1
    """Number of processes that train together, the larger of both runs."""
    together: RankFacts | None = None
    """Measurements over all ranks; None unless the audit saw all of several ranks."""
    full_ranks: int = 1
    """Number of processes that trained together in the full-batch run, as far as the audit saw them."""
    epochs: str = ""
    """Note on the end of an epoch or on cut batches, appended to the verdict; "" where there is none."""
    left_out: str = ""
    """Note on updates that were not compared for want of copied gradients, appended to the verdict; "" for none."""
    float32: bool = False
    """Whether float32 runs were compared because the script trains in a coarser type."""
    stopped_after: float | None = None
    """Time limit in seconds that ended the search for the cause; None where none did."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Questions of that search that could not be asked, with the reason for each."""

    @property
    def tolerance(self) -> float:
        """Below this a fit's residual is rounding, and two weights are the same."""
        # The noise of a run that does not repeat itself is no rounding: as a tolerance it would hide every fault.
        noise = max((update.noise for update in self.updates if not update.unrepeatable), default=FEW_UNITS * self.unit)
        return max(COMPUTED_FLOAT32, 4 * noise)

    @property
    def agrees(self) -> bool:
        """Whether every compared update saw the same samples and has the full batch's gradient."""
        return bool(self.updates) and all(
            update.judged and update.data.is_comparable and update.outcome is Outcome.EQUIVALENT
            for update in self.updates
        )

    @property
    def edit(self) -> FirstDifference | None:
        """Where the runs differ first in what changes equal gradients after the last backward pass; None elsewhere."""
        first = self.controls.first_difference
        return first if first is not None and first.kind is DifferenceKind.AFTER_PASSES else None

    def update_of(self, number: int | None) -> UpdateComparison | None:
        """The comparison of an update."""
        return next((update for update in self.updates if update.number == number), None)

    @property
    def same_pieces(self) -> bool:
        """Whether the first update was fed in the same pieces in both runs."""
        # On several ranks the pieces of a window are spread over the ranks.
        full, first = self.calls.full_windows[:1], self.calls.first
        if not full or first is None or self.together is not None:
            return False
        pieces = [[forward.rows for forward in window.of(Forward)] for window in (full[0], first)]
        return bool(pieces[0]) and pieces[0] == pieces[1] and full[0].backwards == first.backwards

    @property
    def divergent(self) -> UpdateComparison | None:
        """The first update that differs where a difference means something."""
        return next((update for update in self.updates if update.differs), None)
