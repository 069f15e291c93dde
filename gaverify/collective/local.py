"""The verdict on local ranks: one process judges their micro-batches and finds the cause, then they confirm it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from gaverify.causes.investigation import investigate
from gaverify.children.launching import working_folder
from gaverify.collective.facts import apart_by, facts_of, fitted, with_shares
from gaverify.collective.processes import RankReport, Ranks, on_ranks, reported, window_of
from gaverify.errors import ProblemError
from gaverify.passes.batching import micro_batch_sizes
from gaverify.passes.gradients import Gradients, PassResult, full_batch_gradients
from gaverify.passes.precision import buffers_apart
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task
from gaverify.ranks.engines import alone
from gaverify.ranks.traffic import gathers_with_gradient
from gaverify.records.comparison import Method, Outcome
from gaverify.records.facts import Facts
from gaverify.records.ranks import Engine, RankFacts, Traffic
from gaverify.thresholds import U64
from gaverify.verdict.comparison import left_between, measure
from gaverify.verdict.control import Control, in_float64, judge_by_control
from gaverify.verdict.criteria import Grounds, decide
from gaverify.verdict.judging import Judgement, judge, working_unit


def judge_on_ranks(task: Task, ranks: Ranks, *, diagnose: bool, exact: bool = False) -> tuple[Judgement, Facts]:
    """Returns the verdict on the ranks' gradient, and everything that was measured.

    The diagnosis runs in one process, where the ranks diverge: on K · R micro-batches, or, where the code calls
    `torch.distributed` itself on the ranks (in a group of one it may not) and so sees the samples of all at once, on K
    micro-batches that hold what the ranks hold together.

    Args:
        task: Cut into K · R micro-batches.
        ranks: What to run.
        diagnose: Whether to look for the cause of a divergence.
        exact: As `verify` takes it.

    Raises:
        ProblemError: The batch is too small for the ranks, a rank failed, or the problem cannot be verified.
    """
    if task.batch_size < ranks.count * 2 or task.steps < ranks.count:
        least = 2 * ranks.count
        raise ProblemError(f"{ranks.count} ranks need a batch of at least {least} samples, it has {task.batch_size}")

    on_each = replace(task, averaged_over=ranks.count)
    with alone():
        judgement = judge(task, rtol=None, atol=None, keep_gradients=True, exact=exact)
    begun = time.perf_counter()
    task.progress(f"{ranks.count} ranks under {ranks.engine.value}")
    ran = _window_run(on_each, judgement.record, judgement.full, ranks)
    took = time.perf_counter() - begun
    asked, whole = task, judgement
    if ran.talked:
        sizes = micro_batch_sizes(task.batch_size, task.steps // ranks.count)
        asked = replace(task, sizes=sizes, weighting=_together(task.weighting, ranks.count))
    elif task.weighting == "none" and _are_means(judgement):
        asked = on_each  # a mean over the ranks is what such losses need; of sums it is a fault of the ranks
    if asked is not task:
        with alone():
            whole = judge(asked, rtol=None, atol=None, keep_gradients=True, exact=exact)
    begun = time.perf_counter()
    confirmed, found = _confirmed(on_each, judgement, ran, whole, ranks, exact)
    took += time.perf_counter() - begun
    with alone():  # ranks that all agree with the full batch leave nothing to look for
        agree = all(row.outcome is Outcome.EQUIVALENT for row in confirmed.rows)
        facts = investigate(asked, whole, diagnose=diagnose and not agree)
    confirmed.timings = {**judgement.timings, "ranks": took}
    if not found.divergent:
        facts = replace(facts, compared=replace(facts.compared, rows=tuple(confirmed.rows), method=confirmed.method))
    return confirmed, replace(facts, ranks=found)


@dataclass(frozen=True)
class Ran:
    """What the ranks told of their window, and the gradient that they ended up with."""

    reports: list[RankReport]
    gradients: Gradients

    @property
    def talked(self) -> bool:
        """Whether the model or the loss called `torch.distributed`, and so saw more than a rank's own samples."""
        return any(report.calls.count() for report in self.reports)


def _confirmed(
    task: Task, judgement: Judgement, ran: Ran, one: Judgement, ranks: Ranks, exact: bool
) -> tuple[Judgement, RankFacts]:
    """Decides every parameter of the ranks' gradient as one process does, and runs the controls that it calls for.

    Args:
        task: The problem in this process, cut into K · R micro-batches.
        judgement: The verdict of one process on them, with its gradients.
        ran: What the ranks did with them.
        one: The verdict of one process on what the ranks compute together, with its gradients: `judgement`, or that of
            K micro-batches where the code calls `torch.distributed` itself and sees the samples of all ranks.
        ranks: What to run.
        exact: In float64 whatever working precision says.

    Returns:
        The judgement with the rows of the ranks' gradient, and what was measured on the way.

    Raises:
        ProblemError: A rank raised, died, or did not end in time.
    """
    full, together, reports = judgement.full.gradients, one.accumulated.gradients, ran.reports
    measured = {row.name: row for row in measure(ran.gradients, full)}
    unit = working_unit(task, judgement.full, judgement.accumulated)
    scales = judgement.scales
    rows = [
        decide(row, Grounds(Method.WORKING_PRECISION, unit, scales.get(row.name, 0.0))) for row in measured.values()
    ]
    method = Method.WORKING_PRECISION
    if unit > U64 and (exact or any(row.outcome is Outcome.INCONCLUSIVE for row in rows)):
        control, method = _in_float64(task, judgement, ranks), Method.FLOAT64_CONTROL
        rows = judge_by_control(measured, control, scales, unit)
    alike = len({report.digest for report in reports}) == 1
    apart = 0.0 if alike else apart_by([report.reduced for report in reports])
    facts = facts_of(
        rows,
        ranks=ranks.count,
        engine=ranks.engine,
        apart=math.nan if ranks.engine is Engine.FSDP2 else apart,
        window=max((report.window for report in reports), key=Traffic.count),
        own=max((report.calls for report in reports), key=Traffic.count),
        weights=fitted([report.own for report in reports], together, ran.gradients),
        from_one_process=left_between(ran.gradients, together),
        unit=unit,
        buffers_apart=buffers_apart([report.buffers for report in reports], unit),
    )

    def left(**differing: Any) -> float:
        repaired = _window_run(task, judgement.record, judgement.full, ranks, **differing)
        return left_between(repaired.gradients, together)

    if facts.at_fault and facts.gathers:
        facts = replace(facts, gather_control=left(around=gathers_with_gradient))
    if facts.at_fault:
        facts = with_shares(facts, lambda shares: left(shares=shares))
    return replace(judgement, rows=rows, method=method), facts


def _window_run(task: Task, record: DrawRecord, full: PassResult, ranks: Ranks, **differing: Any) -> Ran:
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
        return Ran(reports, torch.load(window.gradients, map_location=task.device, weights_only=False))


def _in_float64(task: Task, judgement: Judgement, ranks: Ranks) -> Control:
    """Runs the ranks in float64, against the full batch of a pass for this purpose."""
    with in_float64(task, judgement.state) as (lifted, state):
        with alone():
            full, _ = full_batch_gradients(lifted, state, judgement.record, lift=True)
        ran = _window_run(lifted, judgement.record, full, ranks, lifted=True)
        return Control({row.name: row for row in measure(ran.gradients, full.gradients)}, full, full)


def _are_means(judgement: Judgement) -> bool:
    """Whether losses that were added up as they are come nearer to K · R times the full batch's than to it."""
    micro, full = judgement.accumulated.micro_losses, judgement.full.loss
    return abs(sum(micro)) > math.sqrt(len(micro)) * abs(full)


def _together(weighting: Any, count: int) -> Any:
    """The recipe for micro-batches that hold what R ranks hold together: explicit weights are added up."""
    if isinstance(weighting, list | tuple):
        return [sum(weighting[at : at + count]) for at in range(0, len(weighting), count)]
    return weighting
