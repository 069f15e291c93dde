"""A divergence is looked into on a part of the batch first: float64 and the search of a cause cost twice the memory.

A fault of structure shows in any few samples. So where working precision shows clearly more than rounding, the first
samples of the batch, cut in two micro-batches, are judged like a batch of their own. What they say counts only where
every parameter shows the same on the whole batch in working precision; else float64 runs on the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from gaverify.causes.listening import Heard
from gaverify.passes.nesting import leaves
from gaverify.passes.task import Task, micro_batch_of
from gaverify.records.comparison import Method, NotCompared, Outcome, ParameterComparison
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.criteria import U32, Difference, record
from gaverify.verdict.judging import SHOWS, Judgement, judge

WORTH = 1 << 18
"""Elements of parameters and batch from which on a part is cheaper than what it saves."""
# Samples of the part's micro-batches: a quarter of the first micro-batch's, and two where that has them.
_QUARTER, _LEAST = 4, 2
# What is rounding in the part is rounding in the batch where it is no larger than a few times as much of the gradient;
# what is a fault in the part is the same in the batch where it is of the same order there.
_FEW, _ORDER = 8.0, 100.0


class Shrunk:
    """The part of a batch that was judged in its place: `task` and `judgement` where it told, and what was heard."""

    def __init__(self, *, listens: bool) -> None:
        self.heard = Heard()
        self.task: Task | None = None
        self.judgement: Judgement | None = None
        self._listens = listens

    def __call__(self, task: Task, judgement: Judgement, unit: float) -> bool:
        """Decides the parameters of a judgement by a part of the batch; False where the part does not tell.

        Args:
            task: The whole batch's.
            judgement: Rows decided in working precision; they are replaced.
            unit: Unit roundoff of the working precision.
        """
        try:
            part = _part_of(task, judgement, unit)
            if part is None:
                return False
            task.progress(f"a part of the batch: {part.batch_size} samples")
            found = judge(part, rtol=None, atol=None, listener=self.heard if self._listens else None)
        except Exception as error:  # a model that does not take so few samples, a loss that is no number
            if is_own_fault(error):
                raise
            return False
        rows = _decided(judgement, found, unit)
        if rows is None:
            return False
        judgement.rows, judgement.method, judgement.part = rows, Method.FLOAT64_PART, part.sizes
        self.task, self.judgement = part, found
        return True

    def forget(self) -> None:
        """Lets go of the part and its passes: the whole batch needs the memory."""
        self.heard.forget()
        self.task = self.judgement = None


def _part_of(task: Task, judgement: Judgement, unit: float) -> Task | None:
    """The first samples as a batch of their own; None where a part would not be like the whole, or not worth it.

    A weighting in words means the same in a part; numbers and functions of the user's may not.
    """
    first, last = task.sizes[0], task.sizes[-1]
    size = min(first, max(_LEAST, first // _QUARTER))
    sizes = (size, size if last == first else max(1, size - 1))
    plain = unit == U32 and task.autocast is None and isinstance(task.weighting, str)
    rows = all(row.why in (None, NotCompared.UNUSED) for row in judgement.rows)
    if not plain or not rows or not _dealt(judgement) or 2 * sum(sizes) > task.batch_size or _elements(task) < WORTH:
        return None
    batch = micro_batch_of(task, 0, sum(sizes), "a part of the batch")
    problem = replace(task.problem, batch=batch, batch_size=sum(sizes))
    return replace(task, problem=problem, batch_size=sum(sizes), sizes=sizes)


def _dealt(judgement: Judgement) -> bool:
    """Whether every draw went to its sample without a doubt."""
    drawn = judgement.record
    return not (drawn.unaligned or drawn.ambiguous or drawn.inner or judgement.accumulated.foreign_draws_differ)


def _elements(task: Task) -> int:
    tensors = [leaf for _, leaf in leaves(task.problem.batch) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() for tensor in (*task.parameters.values(), *tensors))


def _decided(judgement: Judgement, found: Judgement, unit: float) -> list[ParameterComparison] | None:
    """The records of all parameters, where the part and the whole batch show the same; None where one does not."""
    if found.control is None or not _dealt(found):
        return None
    told = {row.name: row for row in found.rows}
    scale = _norm(judgement.working.values()) / max(_norm(found.working.values()), 1e-300)
    rows = []
    for row in judgement.rows:
        here, there, part = judgement.working[row.name], found.working[row.name], told[row.name]
        decided = row if row.why is part.why is NotCompared.UNUSED else None
        if row.why is None and part.why is None:
            decided = _alike(row, here, part, _FEW * scale * there.difference, unit)
        if decided is None:
            return None
        rows.append(decided)
    return rows if any(row.outcome is Outcome.DIVERGENT for row in rows) else None


def _alike(
    row: ParameterComparison, here: Difference, part: ParameterComparison, rounding: float, unit: float
) -> ParameterComparison | None:
    """The record of a parameter that shows the same in the part (float64) and here (working precision)."""
    if part.outcome is Outcome.EQUIVALENT:
        if row.outcome is Outcome.EQUIVALENT:
            return row
        if here.difference > rounding:
            return None
        return record(here, Outcome.EQUIVALENT, Method.FLOAT64_PART, rounding, here.difference)
    most = max(SHOWS * unit, part.relative_difference / _ORDER)
    if part.outcome is not Outcome.DIVERGENT or not here.difference > most * here.reference:
        return None
    allowed = part.relative_allowed * here.reference
    return record(here, Outcome.DIVERGENT, Method.FLOAT64_PART, allowed, here.difference)


def _norm(rows: Iterable[Difference]) -> float:
    return math.hypot(*(row.reference for row in rows if math.isfinite(row.reference)))
