"""Everything that the rules read: plain numbers and names, gathered once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gaverify.gradients import Task
from gaverify.judging import Judgement
from gaverify.probes.batch_quality import identical_samples
from gaverify.probes.micro_batch_weights import WeightFit
from gaverify.probes.module_coupling import Coupling
from gaverify.results import Outcome, ParameterComparison


@dataclass
class Measurements:
    """What was measured about one judged task."""

    rows: tuple[ParameterComparison, ...]
    steps: int
    batch_size: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    weighting: str
    micro_losses: tuple[float, ...]
    method: str
    valid_targets: tuple[float, ...]
    ignored_targets: bool
    draws: int
    draws_sliced: int
    draws_unaligned: dict[str, str]
    foreign_draws_differ: bool
    identical: bool
    fit: WeightFit | None = None
    coupling: Coupling | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, task: Task, judgement: Judgement) -> Measurements:
        """Collects what the two strategies already showed."""
        accumulated, record = judgement.accumulated, judgement.record
        counts = [max(seen.target_counts, key=lambda c: c[1]) for seen in accumulated.observed if seen.target_counts]
        valid = tuple(float(total) for total, _, _ in counts) if len(counts) == task.steps else ()
        ignored = bool(valid) and sum(valid) != sum(count for _, count, _ in counts)
        weighting = task.weighting if isinstance(task.weighting, str) else "explicit"
        return cls(
            rows=tuple(judgement.rows), steps=task.steps, batch_size=task.batch_size, sizes=task.sizes,
            weights=accumulated.weights, weighting=weighting, micro_losses=accumulated.micro_losses,
            method=judgement.method, valid_targets=valid, ignored_targets=ignored, draws=len(record.draws),
            draws_sliced=record.sliced, draws_unaligned=dict(record.unaligned),
            foreign_draws_differ=accumulated.foreign_draws_differ,
            identical=identical_samples(task.problem.batch, task.batch_size),
        )  # fmt: skip

    @property
    def divergent(self) -> tuple[ParameterComparison, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if row.outcome is Outcome.DIVERGENT)

    @property
    def comparable(self) -> bool:
        """Whether every divergent row has finite numbers on both sides."""
        return all(math.isfinite(row.difference_norm) for row in self.divergent)

    @property
    def largest(self) -> str:
        """The largest relative difference as text, with the parameter that shows it."""
        rows = [row for row in self.divergent if math.isfinite(row.relative_difference)]
        if not rows:
            return "no finite difference"
        row = max(rows, key=lambda row: row.relative_difference)
        return f"relative difference {row.relative_difference:.1e} in `{row.name}`"

    @property
    def scale(self) -> tuple[float, float]:
        """The factor c in accumulated ≈ c · full over all parameters, and what it leaves over relative to ‖full‖.

        From the norms alone: a·e = (‖a‖² + ‖e‖² − ‖a − e‖²) / 2.
        """
        rows = [row for row in self.rows if math.isfinite(row.difference_norm)]
        reference = sum(row.reference_norm**2 for row in rows)
        if reference == 0.0:
            return math.nan, math.inf
        factor = sum(row.accumulated_norm**2 + row.reference_norm**2 - row.difference_norm**2 for row in rows) / 2
        factor /= reference
        left = sum(row.accumulated_norm**2 for row in rows) - factor**2 * reference
        return factor, math.sqrt(max(left, 0.0) / reference)
