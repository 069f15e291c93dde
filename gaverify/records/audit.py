"""Frozen records of an audit: names and numbers, no tensors, no torch. What rules read and reports show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gaverify.records.comparison import Outcome, ParameterComparison, relative_total, resolution_of
from gaverify.records.events import Event, Ledger
from gaverify.records.experiment import Cause, ControlRun, LossTerm, WeightFit
from gaverify.records.ranks import RankFacts
from gaverify.records.stages import Clip, SettingDifference, Stage, StageComparison
from gaverify.records.windows import Window
from gaverify.thresholds import COMPUTED_FLOAT32, FEW_UNITS, U32

if TYPE_CHECKING:
    from gaverify.records.facts import State


@dataclass(frozen=True)
class RowCheck:
    """What the forwards of a window were fed in both runs.

    `differing` rows have no counterpart in the other run, in the input tensor `path` where that is worst.
    `adds_nothing`: those that the accumulated run was not fed are no part of the full batch's gradient.
    """

    full: int
    accumulated: int
    differing: int = 0
    path: str = ""
    padded: bool = False
    checked: bool = True
    adds_nothing: bool = False

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
        return self.differing - max(self.accumulated - self.full, 0)

    @property
    def is_part(self) -> bool:
        """Whether the accumulated run was fed some of the full batch's samples and no others."""
        return 0 < self.accumulated < self.full and self.differing == self.full - self.accumulated


@dataclass(frozen=True)
class UpdateComparison:
    """One optimizer update of both runs.

    `judged`: the runs had the same samples and, up to rounding, the same weights, so that a difference means something.
    `weights_difference` is relative, over sampled elements, and NaN where the step was given the full batch's gradient;
    `drifted` names buffers that differ after the update.
    `noise` is how far the gradients of two equal runs are apart, relative; `started_apart` the same of the weights of
    both runs before the update. `unrepeatable` says how the full-batch run differed from its own repetition, where that
    was more than rounding. `parameters`, `outcome` and `fit` are those of the stage that `decided`; `unclear` says that
    both runs changed their sums by hand, which hides what is right. `clips` are those after the last backward pass.
    `step_takes_factor`: a control showed that the step takes out the factor of the gradient, so that the weights agree.
    `counted`: what each micro-batch's loss was divided by, up to one factor, where no targets were seen.
    `scales`: for each micro-batch, what each number was multiplied by that its loss was made from, outermost first.
    `losses`: the value of each number that a backward pass differentiated, as the script had scaled it; NaN if unknown.
    `full_loss`: the value whose gradient the full batch's is, with what its script did to the gradient after the pass.
    `missed`: the samples of networks that take turns, where other networks were fed all of them in both runs and the
    ones of this update only a part.
    `fed`: the samples of all forwards, also of those without a backward pass, where the samples are not the same.
    `never_fed`: how many samples of the full batch the accumulated run was fed neither in this update nor in the next.
    """

    number: int
    outcome: Outcome
    judged: bool
    parameters: tuple[ParameterComparison, ...]
    data: RowCheck
    fit: WeightFit | None = None
    backwards: int = 0
    sizes: tuple[int, ...] = ()
    valid_targets: tuple[int, ...] = ()
    counted: tuple[float, ...] = ()
    scales: tuple[tuple[float, ...], ...] = ()
    ignored_targets: bool = False
    learning_rates: tuple[float, ...] = ()
    learning_rates_full: tuple[float, ...] = ()
    weights_difference: float = math.nan
    drifted: tuple[str, ...] = ()
    started_apart: float = 0.0
    noise: float = 0.0
    unrepeatable: str = ""
    decided: Stage = Stage.USED
    unclear: bool = False
    stages: tuple[StageComparison, ...] = ()
    clips: tuple[Clip, ...] = ()
    clips_full: tuple[Clip, ...] = ()
    settings: tuple[SettingDifference, ...] = ()
    step_takes_factor: bool = False
    missed: RowCheck | None = None
    losses: tuple[float, ...] = ()
    full_loss: float = math.nan
    fed: RowCheck | None = None
    never_fed: int = 0

    @property
    def differs(self) -> bool:
        """Whether the gradients differ where a difference means something."""
        return self.judged and self.outcome is Outcome.DIVERGENT

    @property
    def other_step(self) -> bool:
        """Whether the gradients differ, and the step makes something else of the same gradients as well."""
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
    def relative_difference(self) -> float:
        """‖accumulated − full‖ / ‖full‖ over all parameters together."""
        return relative_total((row.difference_norm, row.reference_norm) for row in self.parameters)

    @property
    def norm_ratio(self) -> float:
        """‖accumulated‖ / ‖full‖ over all parameters together."""
        ratio = relative_total((row.accumulated_norm, row.reference_norm) for row in self.parameters)
        return ratio if math.isfinite(ratio) else math.nan

    @property
    def resolution(self) -> float:
        """The smallest relative difference that could have been seen in the least clear parameter; NaN in none."""
        return resolution_of(self.parameters)


@dataclass(frozen=True)
class Overwritten:
    """A control in which gradients were cleared before every backward pass, and the step used the same ones.

    `left`: how far they were apart, relative. File and line are those that write them, where they are known.
    """

    left: float
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class TransformedGradients:
    """A control in which losses counted `times` as much: whose gradients each micro-batch transforms on its own.

    `parameters` are their names, `responses` how much larger the optimizer saw each of them then. `sums_apart` is how
    far the backward passes' sum is from the full batch's, `halves_apart` how far two halves of the window are from
    adding up, both relative. `all_of_it`: no other parameter differs.
    """

    parameters: tuple[str, ...]
    times: float
    responses: tuple[float, ...]
    sums_apart: float
    halves_apart: float
    all_of_it: bool


@dataclass(frozen=True)
class Record:
    """Everything that the rules read, from the accumulated run and its comparison.

    Args:
        windows: Of the accumulated run (or the only one).
        ledger: What became of its backward passes.
        full_windows: Of the full-batch run; empty with events only.
        updates: The comparisons; empty with events only.
        steps: K where the user said it.
        numbers: The whole numbers among the accumulated run's own arguments: K is one of them as a rule.
        unit: Unit roundoff of the coarsest arithmetic.
        steps_undone: The weights that fit when every step is undone, so that all micro-batches see the same weights.
        dealt: Random draws of the full batch that were dealt out per sample.
        unaligned: Draws that could not be, with the reason.
        full_ledger: What became of the full-batch run's backward passes.
        skipped_alike: The windows in which both runs throw away the gradients of the same samples: skipped updates.
        ranks: Processes that train together.
        together: What all of them did, where the audit saw all; None where it saw one.
        rank_windows: The windows of ranks 1, 2, … of the accumulated run, where the audit saw all.
        full_ranks: Processes that trained together in the full-batch run, as far as the audit saw them.
        epochs: What was seen of an epoch's end, for the verdict; empty where nothing is to be said.
        overwritten: That each backward pass of the first update that differs sets the gradients, where it does.
        unclipped: The updates in a control whose losses are too small to be clipped, where clipping was inside windows.
        terms: Of the loss of the first update that differs, where nothing else explained it and they add up to it.
        coupling: Where samples act on each other, in modules or in the loss, with what the control runs showed.
        backward: The code whose backward depends on the batch, where the losses add up and the gradients do not.
        state: What forwards move and read again, where a run with it put back before each micro-batch agreed.
        transformed: The gradients that each micro-batch transforms before they are added up.
        weighed: The accumulated run with the losses of the first update that differs times what they should count.
        made: The line that made that loss, where a framework's loop called it and differentiates it.
        float32: The script trains below float32, and what is compared are runs in float32.
    """

    windows: tuple[Window, ...]
    ledger: Ledger
    full_windows: tuple[Window, ...] = ()
    updates: tuple[UpdateComparison, ...] = ()
    steps: int | None = None
    unit: float = U32
    steps_undone: WeightFit | None = None
    dealt: int = 0
    unaligned: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()
    full_ledger: Ledger = field(default_factory=lambda: Ledger((), ()))
    skipped_alike: frozenset[int] = frozenset()
    ranks: int = 1
    together: RankFacts | None = None
    rank_windows: tuple[tuple[Window, ...], ...] = ()
    full_ranks: int = 1
    epochs: str = ""
    overwritten: Overwritten | None = None
    unclipped: tuple[UpdateComparison, ...] = ()
    terms: tuple[LossTerm, ...] = ()
    coupling: tuple[Cause, ...] = ()
    backward: Cause | None = None
    transformed: TransformedGradients | None = None
    state: State | None = None
    weighed: ControlRun | None = None
    made: tuple[str, int] | None = None
    float32: bool = False

    @property
    def tolerance(self) -> float:
        """Below this a fit's residual is rounding, and two weights are the same."""
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
    def complete(self) -> tuple[Window, ...]:
        """The windows that ended with a step."""
        return tuple(window for window in self.windows if window.complete)

    @property
    def first(self) -> Window | None:
        """The first window."""
        return self.complete[0] if self.complete else None

    def expected(self, window: Window | None) -> int | None:
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
        return max(1, round(window.backwards * rows / window_rows))

    def update_of(self, number: int) -> UpdateComparison | None:
        """The comparison of an update."""
        return next((update for update in self.updates if update.number == number), None)

    def window_of(self, number: int) -> Window | None:
        """The window of an update."""
        return next((window for window in self.windows if window.number == number), None)

    def usual(self, window: Window | None) -> int:
        """The backward passes that most windows of the same optimizers have; of equally frequent counts the largest."""
        alike = (similar for similar in self.complete if window is not None and similar.optimizers == window.optimizers)
        counts = Counter(similar.backwards for similar in alike)
        return max(counts, key=lambda count: (counts[count], count), default=0)

    def inside(self, kind: str) -> list[Event]:
        """The events of a kind strictly inside windows, unless the full batch's run has such in the same window."""
        ordinary = {full.number for full in self.full_windows if any(e.kind == kind for e in full.before_last_backward)}
        return [
            event
            for window in self.windows
            if window.number not in ordinary
            for event in window.before_last_backward
            if event.kind == kind
        ]

    @property
    def same_pieces(self) -> bool:
        """Whether the first update was fed in the same pieces in both runs."""
        if not self.full_windows or self.first is None or self.together is not None:
            return False
        pieces = [
            [event.values.get("rows") for event in window.of("forward")]
            for window in (self.full_windows[0], self.first)
        ]
        return bool(pieces[0]) and pieces[0] == pieces[1] and self.full_windows[0].backwards == self.first.backwards

    @property
    def divergent(self) -> UpdateComparison | None:
        """The first update that differs where a difference means something."""
        return next((update for update in self.updates if update.differs), None)
