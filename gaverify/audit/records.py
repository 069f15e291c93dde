"""Frozen records of an audit: names and numbers, no tensors, no torch. What rules read and reports show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from gaverify.audit.events import Event
from gaverify.audit.windows import Ledger, Window
from gaverify.results import Outcome, ParameterComparison


@dataclass(frozen=True)
class RowCheck:
    """What the forwards of a window were fed in both runs.

    `differing` rows have no counterpart in the other run, in the input tensor `path` where that is worst.
    """

    full: int
    accumulated: int
    differing: int = 0
    path: str = ""
    padded: bool = False
    checked: bool = True

    @property
    def same(self) -> bool:
        """Whether the samples are the same, as far as could be checked."""
        return self.differing == 0


@dataclass(frozen=True)
class WeightFit:
    """Least squares over sampled gradient elements; residuals are relative.

        g_used ≈ factor · g_full        g_used ≈ Σ used_k g_k        g_full ≈ Σ right_k g_k

    `determined`: the micro-batch gradients tell all weights apart.
    """

    factor: float
    factor_residual: float
    used: tuple[float, ...]
    used_residual: float
    right: tuple[float, ...]
    residual: float
    determined: bool

    @property
    def multipliers(self) -> tuple[float, ...]:
        """right_k / used_k: what each micro-batch's loss should be multiplied by, 1 where its weight is right.

        A micro-batch that never reached the step (used 0) is held against the usual weight of the others.
        """
        present = sorted(abs(weight) for weight in self.used if abs(weight) > 1e-6 * max(map(abs, self.used)))
        usual = present[len(present) // 2] if present else 1.0
        return tuple(
            right / (used if abs(used) > 1e-6 * usual else usual)
            for right, used in zip(self.right, self.used, strict=True)
        )


@dataclass(frozen=True)
class UpdateComparison:
    """One optimizer update of both runs.

    `judged`: the runs had the same samples and, up to rounding, the same weights, so that a difference means something.
    `weights_difference` is relative, over sampled elements; `drifted` names buffers that differ after the update.
    `noise` is how far the gradients of two equal runs are apart, relative; `started_apart` the same of the weights of
    both runs before the update. `unrepeatable` says how the full-batch run differed from its own repetition, where that
    was more than rounding.
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
    ignored_targets: bool = False
    learning_rates: tuple[float, ...] = ()
    learning_rates_full: tuple[float, ...] = ()
    weights_difference: float = math.nan
    drifted: tuple[str, ...] = ()
    started_apart: float = 0.0
    noise: float = 0.0
    unrepeatable: str = ""

    @property
    def largest(self) -> ParameterComparison | None:
        """The parameter with the largest finite relative difference among the worst outcomes."""
        rows = [row for row in self.parameters if math.isfinite(row.relative_difference)]
        divergent = [row for row in rows if row.outcome is Outcome.DIVERGENT]
        return max(divergent or rows, key=lambda row: row.relative_difference, default=None)

    @property
    def relative_difference(self) -> float:
        """‖accumulated − full‖ / ‖full‖ over all parameters together."""
        rows = [row for row in self.parameters if math.isfinite(row.difference_norm)]
        full = math.sqrt(sum(row.reference_norm**2 for row in rows))
        difference = math.sqrt(sum(row.difference_norm**2 for row in rows))
        return difference / full if full else (0.0 if not difference else math.inf)

    @property
    def norm_ratio(self) -> float:
        """‖accumulated‖ / ‖full‖ over all parameters together."""
        rows = [row for row in self.parameters if math.isfinite(row.difference_norm)]
        full = math.sqrt(sum(row.reference_norm**2 for row in rows))
        return math.sqrt(sum(row.accumulated_norm**2 for row in rows)) / full if full else math.nan

    @property
    def resolution(self) -> float:
        """The smallest relative difference that could have been seen in the least clear parameter; NaN in none."""
        # a gradient below its own rounding has no relative difference to speak of
        known = [row.relative_allowed for row in self.parameters if row.reference_norm > row.allowed]
        return max((value for value in known if value > 0), default=math.nan)


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
        held: The weights that fit when every step is undone, so that all micro-batches see the same weights.
        dealt: Random draws of the full batch that were dealt out per sample.
        unaligned: Draws that could not be, with the reason.
    """

    windows: tuple[Window, ...]
    ledger: Ledger
    full_windows: tuple[Window, ...] = ()
    updates: tuple[UpdateComparison, ...] = ()
    steps: int | None = None
    unit: float = 2.0**-24
    held: WeightFit | None = None
    dealt: int = 0
    unaligned: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()

    @property
    def tolerance(self) -> float:
        """Below this a fit's residual is rounding, and two weights are the same."""
        noise = max((update.noise for update in self.updates if not update.unrepeatable), default=16 * self.unit)
        return max(1e-4, 4 * noise)

    @property
    def complete(self) -> tuple[Window, ...]:
        """The windows that ended with a step."""
        return tuple(window for window in self.windows if window.complete)

    @property
    def first(self) -> Window | None:
        """The first window."""
        return self.complete[0] if self.complete else None

    def expected(self, window: Window) -> int | None:
        """How many backward passes the window should have, as far as it is known.

        The user's K; else as many as feed the rows that the full-batch run used for this update.
        """
        if self.steps is not None:
            return self.steps
        whole = next((full for full in self.full_windows if full.number == window.number), None)
        if whole is None or not whole.rows or not window.rows:
            return None
        if whole.backwards > min(full.backwards for full in self.full_windows if full.optimizers == whole.optimizers):
            return None  # the full batch's own window is longer than its others: it tells nothing about K
        return max(1, round(window.backwards * whole.rows / window.rows))

    def expected_of(self, number: int) -> int | None:
        """The same for the window of an update by its number."""
        window = self.window_of(number)
        return self.expected(window) if window is not None else None

    def update_of(self, number: int) -> UpdateComparison | None:
        """The comparison of an update."""
        return next((update for update in self.updates if update.number == number), None)

    def window_of(self, number: int) -> Window | None:
        """The window of an update."""
        return next((window for window in self.windows if window.number == number), None)

    def usual(self, window: Window | None) -> int:
        """The backward passes that most windows of the same optimizers have; of equally frequent counts the largest."""
        alike = (other for other in self.complete if window is not None and other.optimizers == window.optimizers)
        counts = Counter(other.backwards for other in alike)
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
        if not self.full_windows or self.first is None:
            return False
        pieces = [[event.values.get("rows") for event in window.of("forward")]
                  for window in (self.full_windows[0], self.first)]  # fmt: skip
        return bool(pieces[0]) and pieces[0] == pieces[1] and self.full_windows[0].backwards == self.first.backwards

    @property
    def divergent(self) -> UpdateComparison | None:
        """The first update that differs where a difference means something."""
        return next((update for update in self.updates if update.judged and update.outcome is Outcome.DIVERGENT), None)
