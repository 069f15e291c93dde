"""The verdict on R ranks: one process judges the same micro-batches and finds the cause, then the ranks confirm it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from torch import nn

from gaverify.causes.investigation import investigate
from gaverify.errors import ProblemError
from gaverify.passes.batching import micro_batch_sizes
from gaverify.passes.task import Task
from gaverify.ranks.confirming import confirm
from gaverify.ranks.groups import group_of_one
from gaverify.ranks.window import Ranks
from gaverify.records.comparison import Outcome
from gaverify.records.facts import Facts
from gaverify.verdict.judging import Judgement, judge


def judge_on_ranks(task: Task, ranks: Ranks, *, diagnose: bool, exact: bool = False) -> tuple[Judgement, Facts]:
    """Returns the verdict on the ranks' gradient, and everything that was measured.

    The diagnosis runs in one process: on K · R micro-batches, or, where the code calls `torch.distributed` itself (or
    a `SyncBatchNorm` does) and so sees the samples of all ranks at once, on K micro-batches that hold what the ranks
    hold together.

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
    with group_of_one() as meter:
        judgement = judge(task, rtol=None, atol=None, keep_gradients=True, exact=exact)
        talks = bool(meter.traffic.count()) or _shares_statistics(task)
        if task.weighting == "none" and not talks and _are_means(judgement):
            task = on_each  # a mean over the ranks is what such losses need; of sums it is a fault of the ranks
            judgement = judge(task, rtol=None, atol=None, keep_gradients=True, exact=exact)
        whole = judgement
        if talks:
            sizes = micro_batch_sizes(task.batch_size, task.steps // ranks.count)
            task_of_one = replace(task, sizes=sizes, weighting=_together(task.weighting, ranks.count))
            whole = judge(task_of_one, rtol=None, atol=None, keep_gradients=True, exact=exact)
            facts = investigate(task_of_one, whole, diagnose=diagnose)
        else:
            facts = investigate(task, judgement, diagnose=diagnose)
    begun = time.perf_counter()
    task.progress(f"{ranks.count} ranks under {ranks.engine.value}")
    confirmation = confirm(on_each, judgement, whole, ranks, exact=exact)
    timings = {**judgement.timings, "ranks": time.perf_counter() - begun}
    judgement = replace(judgement, rows=list(confirmation.rows), method=confirmation.method, timings=timings)
    if not any(row.outcome is Outcome.DIVERGENT for row in confirmation.rows):
        facts = replace(facts, compared=replace(facts.compared, rows=confirmation.rows, method=confirmation.method))
    return judgement, replace(facts, ranks=confirmation.facts)


def _shares_statistics(task: Task) -> bool:
    """Whether a module takes statistics over all ranks, which it does without a call in a group of one."""
    modules = (module for root in task.modules for module in root.modules())
    return any(isinstance(module, nn.SyncBatchNorm) and module.training for module in modules)


def _are_means(judgement: Judgement) -> bool:
    """Whether losses that were added up as they are come nearer to K · R times the full batch's than to it."""
    micro, full = judgement.accumulated.micro_losses, judgement.full.loss
    return abs(sum(micro)) > math.sqrt(len(micro)) * abs(full)


def _together(weighting: Any, count: int) -> Any:
    """The recipe for micro-batches that hold what R ranks hold together: explicit weights are added up."""
    if isinstance(weighting, list | tuple):
        return [sum(weighting[at : at + count]) for at in range(0, len(weighting), count)]
    return weighting
