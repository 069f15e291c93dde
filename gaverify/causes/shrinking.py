"""A divergence is looked into on a part of the batch first: float64 and the search of a cause cost twice the memory.

A fault of structure shows in any few samples. So where working precision shows clearly more than rounding, the first
samples of the batch, cut in two micro-batches, are judged like a batch of their own. What they say counts only where
every parameter shows the same on the whole batch in working precision; else float64 runs on the whole batch. Below
float32 a parameter alone shows little: there the whole gradient has shown it (`verdict/window`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from gaverify.causes.investigation import ControlListener, investigate
from gaverify.passes.gradients import accumulated_gradients, full_batch_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task, micro_batch_of
from gaverify.records.comparison import Method, NotCompared, Outcome, ParameterComparison
from gaverify.records.facts import Facts
from gaverify.thresholds import FEW_TIMES, FEW_UNITS, SAME_ORDER, SHOWS_UNITS, TINY, U32
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import measure
from gaverify.verdict.control import Listener, float64_control
from gaverify.verdict.criteria import Difference, record, zero_in_float64
from gaverify.verdict.judging import Judgement, decide_by_control, judge
from gaverify.verdict.window import worth

# Samples of the part's micro-batches: a quarter of the first micro-batch's, and two where that has them; no more than
# show a fault as well as any number of them does.
_QUARTER, _LEAST, _MOST = 4, 2, 1024


class Shrunk:
    """A part of the batch that is judged in its place; `part_facts` is what the search for the cause showed in it."""

    def __init__(self, *, searches: bool) -> None:
        self.part_facts: Facts | None = None
        self._searches = searches

    def __call__(self, task: Task, judgement: Judgement, unit: float) -> bool:
        """Decides the parameters of a judgement by a part of the batch; False where the part does not tell.

        Where it diverges it is searched, too, even if float64 then has to decide the whole batch.

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
            listener = ControlListener()
            part_judgement = _judge_part(part, judgement, unit, listener if self._searches else None)
            rows = _decide_by_part(task, part, judgement, part_judgement, unit)
            if self._searches:
                self.part_facts = investigate(part, part_judgement, diagnose=True, listener=listener, in_part=True)
        except Exception as error:  # a model that does not take so few samples, a loss that is no number
            if is_own_fault(error):
                raise
            return False
        if rows is None:
            return False
        judgement.rows, judgement.method, judgement.part = rows, Method.FLOAT64_PART, part.sizes
        return True


def _part_of(task: Task, judgement: Judgement, unit: float) -> Task | None:
    """The first samples as a batch of their own; None where a part would not be like the whole, or not worth it.

    A weighting in words means the same in a part; numbers and functions of the user's may not.
    """
    first, last = task.sizes[0], task.sizes[-1]
    size = min(first, max(_LEAST, first // _QUARTER), _MOST)
    sizes = (size, size if last == first else max(1, size - 1))
    looked_into = judgement.few is not None or (unit == U32 and task.autocast is None)
    plain = isinstance(task.weighting, str) and looked_into
    rows = all(row.why in (None, NotCompared.UNUSED) for row in judgement.rows)
    if not plain or not rows or 2 * sum(sizes) > task.batch_size or not worth(task):
        return None
    batch = micro_batch_of(task, 0, sum(sizes), "a part of the batch")
    problem = replace(task.problem, batch=batch, batch_size=sum(sizes))
    return replace(task, problem=problem, batch_size=sum(sizes), sizes=sizes)


def _judge_part(part: Task, judgement: Judgement, unit: float, listener: Listener | None) -> Judgement:
    """Judges the part; by float64 alone in float32, where what working precision makes of it is known from the whole.

    Its draws are dealt in the reading that was right for the whole.
    """
    low, drawn = judgement.few is not None, judgement.record  # below float32, float64 of the part alone tells
    in_both = partial(judge, part, rtol=None, atol=None, exact=low, listener=listener)
    if low:
        return in_both()
    state = ModelState(part.modules, (part.problem.loss,))
    record = full_batch_gradients(part, state)[1] if drawn.count else DrawRecord()
    record.inner = drawn.inner
    control = float64_control(part, state, record, listener)
    losses = (control.full.loss, *control.accumulated.micro_losses)
    if record.ambiguous > drawn.ambiguous or not all(map(math.isfinite, losses)):
        return in_both()
    # what working precision makes of the part is worked out from what it makes of the whole
    scale = _norm(control.rows.values()) / max(_norm(judgement.working.values()), TINY)
    working = {name: row._replace(difference=scale * row.difference) for name, row in judgement.working.items()}
    scales = {name: scale * terms for name, terms in judgement.scales.items()}
    passes = control.full, control.accumulated
    part_judgement = Judgement([], Method.FLOAT64_CONTROL, *passes, record, state, judgement.dtype, working, {}, scales)
    decide_by_control(part, part_judgement, control, unit)
    return replace(part_judgement, working={})


def _decide_by_part(
    task: Task, part: Task, judgement: Judgement, part_judgement: Judgement, unit: float
) -> list[ParameterComparison] | None:
    """The records of all parameters, where the part and the whole batch show the same; None where one does not."""
    if part_judgement.control is None:
        return None
    part_rows = {row.name: row for row in part_judgement.rows}
    # What comes of the samples' differences falls with the square root of their number.
    order = SAME_ORDER * math.sqrt(task.sizes[0] / part.sizes[0])
    rounds = _rounding_of(part, judgement, part_judgement, unit)
    rows = []
    for row in judgement.rows:
        difference, part_row = judgement.working[row.name], part_rows[row.name]
        decided = row if row.why is part_row.why is NotCompared.UNUSED else None
        if row.why is None and part_row.why is None:
            least = SHOWS_UNITS * unit if judgement.few is None else 0.0
            decided = _alike(row, difference, part_row, rounds, least, order)
        if decided is None:
            return None
        rows.append(decided)
    return rows if any(row.outcome is Outcome.DIVERGENT for row in rows) else None


def _rounding_of(part: Task, judgement: Judgement, part_judgement: Judgement, unit: float) -> Callable[[str], float]:
    """How far working precision may round the whole batch's gradient of a parameter that is equivalent in the part."""
    norm = _norm(judgement.working.values())
    zero = zero_in_float64(row.reference_norm for row in part_judgement.rows)
    nothing = {row.name for row in part_judgement.rows if max(row.reference_norm, row.accumulated_norm) <= zero}
    part_differences: dict[str, Difference] = dict(part_judgement.working)

    def rounding(name: str) -> float:
        # a gradient that is zero: what shifts the logits of a softmax rounds like the gradients behind it
        if name in nothing and judgement.working[name].scale <= FEW_UNITS * unit * norm:
            return FEW_UNITS * unit * norm
        if not part_differences:
            part_differences.update(_measure_in_working_precision(part, part_judgement))
        return FEW_TIMES * norm / max(_norm(part_differences.values()), TINY) * part_differences[name].difference

    return rounding


def _measure_in_working_precision(part: Task, part_judgement: Judgement) -> dict[str, Difference]:
    full = full_batch_gradients(part, part_judgement.state, part_judgement.record)[0]
    accumulated = accumulated_gradients(part, part_judgement.state, part_judgement.record, full)
    return {row.name: row for row in measure(accumulated.gradients, full.gradients)}


def _alike(
    row: ParameterComparison,
    here: Difference,
    part: ParameterComparison,
    rounds: Callable[[str], float],
    least: float,
    order: float,
) -> ParameterComparison | None:
    """The record of a parameter that shows the same in the part (float64) and here (working precision)."""
    if part.outcome is Outcome.EQUIVALENT:
        if row.outcome is Outcome.EQUIVALENT:
            return row
        rounding = rounds(row.name)
        if here.difference > rounding:
            return None
        return record(here, Outcome.EQUIVALENT, Method.FLOAT64_PART, rounding, here.difference)
    most = max(least, part.relative_difference / order)
    if part.outcome is not Outcome.DIVERGENT or not here.difference > most * here.reference:
        return None
    allowed = part.relative_allowed * here.reference
    return record(here, Outcome.DIVERGENT, Method.FLOAT64_PART, allowed, here.difference)


def _norm(rows: Iterable[Difference]) -> float:
    return math.hypot(*(row.reference for row in rows if math.isfinite(row.reference)))
