"""The verdict on R ranks: one process judges the same micro-batches and finds the cause, then the ranks confirm it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from gaverify.causes.investigation import investigate
from gaverify.errors import ProblemError
from gaverify.passes.batching import micro_batch_sizes
from gaverify.passes.task import Task
from gaverify.ranks.confirming import confirm, window_run
from gaverify.ranks.groups import alone
from gaverify.ranks.window import Ranks
from gaverify.records.comparison import Outcome
from gaverify.records.facts import Facts
from gaverify.verdict.judging import Judgement, judge


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
    ran = window_run(on_each, judgement.record, judgement.full, ranks)
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
    confirmation = confirm(on_each, judgement, ran, whole, ranks, exact=exact)
    took += time.perf_counter() - begun
    with alone():  # ranks that all agree with the full batch leave nothing to look for
        agree = all(row.outcome is Outcome.EQUIVALENT for row in confirmation.rows)
        facts = investigate(asked, whole, diagnose=diagnose and not agree)
    timings = {**judgement.timings, "ranks": took}
    judgement = replace(judgement, rows=list(confirmation.rows), method=confirmation.method, timings=timings)
    if not any(row.outcome is Outcome.DIVERGENT for row in confirmation.rows):
        facts = replace(facts, compared=replace(facts.compared, rows=confirmation.rows, method=confirmation.method))
    return judgement, replace(facts, ranks=confirmation.facts)


def _are_means(judgement: Judgement) -> bool:
    """Whether losses that were added up as they are come nearer to K · R times the full batch's than to it."""
    micro, full = judgement.accumulated.micro_losses, judgement.full.loss
    return abs(sum(micro)) > math.sqrt(len(micro)) * abs(full)


def _together(weighting: Any, count: int) -> Any:
    """The recipe for micro-batches that hold what R ranks hold together: explicit weights are added up."""
    if isinstance(weighting, list | tuple):
        return [sum(weighting[at : at + count]) for at in range(0, len(weighting), count)]
    return weighting
