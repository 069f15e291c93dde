"""Runs a judged problem on R ranks and holds the gradient that they end up with against the full batch's.

Shapes: R ranks, K micro-batches each; S sampled elements of all gradients together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gaverify.children import working_folder
from gaverify.passes.gradients import Gradients, PassResult
from gaverify.passes.precision import buffers_apart
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task
from gaverify.passes.weight_fit import SINGULAR_FLOAT32, fit_weights
from gaverify.ranks.gathering import gathers_with_gradient
from gaverify.ranks.groups import alone
from gaverify.ranks.rank import RankReport, merged, reported, sampled
from gaverify.ranks.window import Ranks, on_ranks, window_of
from gaverify.records.comparison import Method, Outcome, ParameterComparison
from gaverify.records.ranks import Engine, RankFacts, Traffic
from gaverify.records.totals import relative_total
from gaverify.records.weights import WeightFit
from gaverify.thresholds import U64
from gaverify.verdict.comparison import left_between, measure
from gaverify.verdict.control import in_float64
from gaverify.verdict.criteria import Difference, Grounds, decide
from gaverify.verdict.judging import Judgement, working_unit


@dataclass(frozen=True)
class Ran:
    """What the ranks told of their window, and the gradient that they ended up with."""

    reports: list[RankReport]
    gradients: Gradients

    @property
    def talked(self) -> bool:
        """Whether the model or the loss called `torch.distributed`, and so saw more than a rank's own samples."""
        return any(report.calls.count() for report in self.reports)


@dataclass(frozen=True)
class Confirmation:
    """What the ranks' gradient came to, and what was measured on the way."""

    rows: tuple[ParameterComparison, ...]
    facts: RankFacts
    method: Method


def confirm(
    task: Task, judgement: Judgement, ran: Ran, one: Judgement, ranks: Ranks, *, exact: bool = False
) -> Confirmation:
    """Decides every parameter of the ranks' gradient as one process does, and runs the controls that it calls for.

    Args:
        task: The problem in this process, cut into K · R micro-batches.
        judgement: The verdict of one process on them, with its gradients.
        ran: What the ranks did with them.
        one: The verdict of one process on what the ranks compute together, with its gradients: `judgement`, or that of
            K micro-batches where the code calls `torch.distributed` itself and sees the samples of all ranks.
        ranks: What to run.
        exact: In float64 whatever working precision says.

    Raises:
        ProblemError: A rank raised, died, or did not end in time.
    """
    full, together = judgement.full.gradients, one.accumulated.gradients
    reports, gradients = ran.reports, ran.gradients
    working = {row.name: row for row in measure(gradients, full)}
    unit = working_unit(task, judgement.full, judgement.accumulated)
    rows = [decide(row, _working(row, unit, judgement.scales)) for row in working.values()]
    method = Method.WORKING_PRECISION
    if unit > U64 and (exact or any(row.outcome is Outcome.INCONCLUSIVE for row in rows)):
        rows, method = _in_float64(task, judgement, ranks, working, unit), Method.FLOAT64_CONTROL
    facts = RankFacts(
        ranks=ranks.count,
        engine=ranks.engine,
        apart=_apart(reports, ranks.engine),
        window=max((report.window for report in reports), key=Traffic.count),
        own=max((report.calls for report in reports), key=Traffic.count),
        weights=_weights(reports, together, gradients),
        difference=relative_total((row.difference_norm, row.reference_norm) for row in rows),
        from_one_process=left_between(gradients, together),
        unit=unit,
        divergent=any(row.outcome is Outcome.DIVERGENT for row in rows),
        buffers_apart=buffers_apart([report.buffers for report in reports], unit),
    )
    if facts.at_fault and facts.gathers:
        repaired = window_run(task, judgement.record, judgement.full, ranks, around=gathers_with_gradient)
        facts = replace(facts, gather_control=left_between(repaired.gradients, together))
    for shares in facts.shares_to_try if facts.at_fault else ():
        repaired = window_run(task, judgement.record, judgement.full, ranks, shares=shares)
        facts = replace(facts, weights_control=left_between(repaired.gradients, together), shares_tried=shares)
    return Confirmation(tuple(rows), facts, method)


def _working(row: Difference, unit: float, scales: Mapping[str, float]) -> Grounds:
    return Grounds(Method.WORKING_PRECISION, unit, scales.get(row.name, 0.0))


def window_run(task: Task, record: DrawRecord, full: PassResult, ranks: Ranks, **differing: Any) -> Ran:
    """Runs every micro-batch of a task on its rank.

    Args:
        task: Cut into K · R micro-batches.
        record: What the full batch drew.
        full: What it showed.
        ranks: What to run.
        differing: Fields of the `Window` that are not those of the first one.

    Raises:
        ProblemError: A rank raised, died, or did not end in time.
    """
    with working_folder("gaverify-ranks-") as folder:
        window = replace(window_of(task, record, full, ranks, folder), **differing)
        reports = on_ranks(reported, window)
        return Ran(reports, merged(reports, list(task.parameters), task.device))


def _in_float64(
    task: Task, judgement: Judgement, ranks: Ranks, working: Mapping[str, Difference], unit: float
) -> list[ParameterComparison]:
    """Runs the ranks in float64, against the full batch of the float64 control or of a pass for this purpose."""
    from gaverify.passes.gradients import full_batch_gradients

    with in_float64(task, judgement.state) as (lifted, state):
        with alone():
            full, _ = full_batch_gradients(lifted, state, judgement.record, lift=True)
        ran = window_run(lifted, judgement.record, full, ranks, lifted=True)
        rows = measure(ran.gradients, full.gradients)
    return [
        decide(
            row,
            Grounds(
                Method.FLOAT64_CONTROL, U64, judgement.scales.get(row.name, 0.0), working[row.name].difference, unit
            ),
        )
        for row in rows
    ]


def _apart(reports: Sequence[RankReport], engine: Engine) -> float:
    """How far the ranks' reduced gradients are apart, relative to the first one's norm; NaN where they hold shards."""
    if engine is Engine.FSDP2:
        return math.nan
    first = _laid_out(reports[0].samples)
    norm = float(torch.linalg.vector_norm(first))
    differing = [report for report in reports[1:] if report.digest != reports[0].digest]
    apart = [float(torch.linalg.vector_norm(_laid_out(report.samples) - first)) for report in differing]
    return max(apart, default=0.0) / norm if norm else math.inf if any(apart) else 0.0


def _laid_out(samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All samples end to end, shape (S,)."""
    return torch.cat(list(samples.values())) if samples else torch.zeros(0, dtype=torch.float64, device="cpu")


def _weights(reports: Sequence[RankReport], target: Gradients, reduced: Gradients) -> WeightFit | None:
    """Fits the ranks' own gradients to the one of one process and to the one that they used, on sampled elements."""
    names = [name for name, gradient in target.items() if gradient is not None and reduced[name] is not None]
    names = [name for name in names if all(report.own[name].numel() for report in reports)]
    if not names:
        return None
    own = torch.stack([_laid_out({name: report.own[name] for name in names}) for report in reports], dim=1)
    wanted, used = (_laid_out({name: sampled(side[name]) for name in names}) for side in (target, reduced))
    finite = all(bool(torch.isfinite(values).all()) for values in (own, wanted, used))
    return fit_weights(own, wanted, used=used, singular=SINGULAR_FLOAT32) if finite and bool(wanted.any()) else None
