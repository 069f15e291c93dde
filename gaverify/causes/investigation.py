"""What a verification showed, and where it diverged, what its search for the cause found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gaverify.causes.listening import Heard
from gaverify.passes.lifting import has_hooks
from gaverify.passes.limiting import TimeUp
from gaverify.passes.nesting import leaves
from gaverify.passes.precision import buffers_differ
from gaverify.passes.task import Task
from gaverify.records.compared import Compared
from gaverify.records.comparison import Method
from gaverify.records.facts import EXPLICIT, Backward, Buffers, Draws, Facts, Weights
from gaverify.verdict.comparison import measure
from gaverify.verdict.judging import Judgement, judge_whole, working_unit


def collected(task: Task, judgement: Judgement) -> Facts:
    """Returns what the two strategies showed already, without another pass."""
    accumulated, record = judgement.accumulated, judgement.record
    counts = [max(seen.target_counts, key=lambda c: c[1]) for seen in accumulated.observed if seen.target_counts]
    valid = tuple(float(total) for total, _, _ in counts) if len(counts) == task.steps else ()
    ignored = bool(valid) and sum(valid) != sum(count for _, count, _ in counts)
    weighting = task.weighting if isinstance(task.weighting, str) else EXPLICIT
    return Facts(
        steps=task.steps,
        batch_size=task.batch_size,
        compared=Compared(
            tuple(judgement.rows), judgement.method, judgement.control_failure, precision=judgement.precision
        ),
        weights=Weights(accumulated.weights, weighting, task.sizes, accumulated.micro_losses, valid, ignored),
        draws=Draws(
            record.count,
            record.sliced,
            dict(record.unaligned),
            dict(record.places),
            accumulated.foreign_draws_differ,
            dict(record.shared),
        ),
        buffers=Buffers(_drift(task, judgement)),
        backward=Backward(hooked=tuple(n for n, p in task.parameters.items() if has_hooks(p))),
        identical=_identical_samples(task.problem.batch, task.batch_size),
    )


def _drift(task: Task, judgement: Judgement) -> dict[str, float]:
    """The buffers that K micro-batches leave otherwise than the full batch, with their relative difference.

    One with a row per sample (a recurrent state, a cache) holds those of the last batch: there is nothing to compare.
    """
    full, accumulated = judgement.full.buffers, judgement.accumulated.buffers
    shapes = {name: value.shape for name, value in accumulated.items()}
    common = {name: value for name, value in full.items() if shapes.get(name) == value.shape}
    if not common:
        return {}
    unit = working_unit(task, judgement.full, judgement.accumulated)
    rows = measure({name: accumulated[name] for name in common}, common)
    apart = {row.name: row.difference / row.scale for row in rows if row.difference > 0}
    return {name: far for name, far in apart.items() if buffers_differ(accumulated[name], full[name], unit)}


def _identical_samples(batch: Any, batch_size: int) -> bool:
    """Returns whether all samples of the batch are the same, so that no coupling between them could show."""
    compared = False
    for _, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            return False  # samples of lengths of their own
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.dim() > 0:
            if leaf.shape[0] != batch_size or batch_size < 2:
                return False
            if not bool((leaf == leaf[:1]).all()):
                return False
            compared = True
    return compared


def investigate(
    task: Task, judgement: Judgement, *, diagnose: bool, heard: Heard | None = None, found: Facts | None = None
) -> Facts:
    """Returns everything that was measured; questions are asked only after a divergence; one that fails says so.

    A search that has a time limit returns what it found until then.

    Args:
        task: What was run.
        judgement: What was decided, with its passes.
        diagnose: Whether to look for the cause of a divergence.
        heard: What listened to the float64 control.
        found: What the search showed in a part of the batch, where there was one: it is confirmed on all of it.
    """
    facts = collected(task, judgement)
    if not diagnose or not facts.compared.divergent or task.steps < 2:
        return facts
    facts = replace(facts, diagnosed=True)
    if not facts.compared.comparable:
        return facts
    try:
        with task.limit.searching():
            return _searched(task, judgement, facts, heard, found)
    except TimeUp:
        return replace(facts, stopped_after=task.limit.seconds)


def _searched(task: Task, judgement: Judgement, facts: Facts, heard: Heard | None, found: Facts | None) -> Facts:
    """The facts with what the search found, as far as it came in its time."""
    from gaverify.causes.questions import asked  # a verdict without a cause to look for does not wait for this import

    if judgement.method is not Method.FLOAT64_PART or found is None:
        return asked(task, judgement, facts, heard or Heard(), found)
    from gaverify.causes.confirming import confirmed_in_working_precision

    known = confirmed_in_working_precision(task, judgement, facts, found)
    if known is not None:
        return known
    judge_whole(task, judgement, heard)
    return investigate(task, judgement, diagnose=True, heard=heard, found=found)
