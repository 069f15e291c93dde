"""A divergence is looked into on a part of the batch first: float64 and the search of a cause cost twice the memory.

A fault of structure shows in any few samples. So where working precision shows clearly more than rounding, the first
samples of the batch, cut in two micro-batches, are judged like a batch of their own. What they say counts only where
every parameter shows the same on the whole batch in working precision; else float64 runs on the whole batch. Below
float32 a parameter alone shows little: there the whole gradient has shown it (`verdict/window`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gaverify.passes.experiment import Experiment
from gaverify.records.comparison import Method, NotCompared, Outcome, ParameterComparison
from gaverify.records.facts import Facts
from gaverify.search.investigation import investigate, watch_state
from gaverify.thresholds import FEW_TIMES, FEW_UNITS, SAME_ORDER, SHOWS_UNITS, TINY, U32
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import measure
from gaverify.verdict.control import MakeWatch, run_in_float64
from gaverify.verdict.criteria import Difference, record, zero_in_float64
from gaverify.verdict.decision import Decision, decide_by_float64, measure_and_decide
from gaverify.verdict.measurement import Measurement, is_worth_a_part

# Samples of the part's micro-batches: a quarter of the first micro-batch's, and two where that has them; no more than
# show a fault as well as any number of them does.
_QUARTER, _LEAST, _MOST = 4, 2, 1024


@dataclass(frozen=True)
class FirstSamplesAnswer:
    """What the first samples showed, measured, decided and searched in the place of the whole batch."""

    open_decision: Decision
    """What the user's precision told of the whole batch, still open."""
    decision: Decision | None = None
    """The parameters of the whole batch, decided by the first samples; None: these do not tell."""
    facts: Facts | None = None
    """What the search for a cause showed in them; None: they were not searched."""


def examine_first_samples(measurement: Measurement, decision: Decision, *, searches: bool) -> FirstSamplesAnswer:
    """Measures, decides and searches the first samples in float64, in the place of the whole batch.

    A part that diverges is searched even if it does not tell, and float64 then has to decide the whole batch.

    Args:
        measurement: Of the whole batch, in working precision.
        decision: What that told, still open.
        searches: Whether to look for the cause of a divergence.
    """
    facts = None
    try:
        part = _part_of(measurement, decision)
        if part is None:
            return FirstSamplesAnswer(decision)
        part.progress(f"a part of the batch: {part.batch_size} samples")
        part_answer = _judge_part(part, measurement, decision, watch_state if searches else None)
        rows = _decide_by_part(measurement, decision, *part_answer)
        if searches:
            facts = investigate(*part_answer, diagnose=True, in_part=True)
    except Exception as error:  # a model that does not take so few samples, a loss that is no number
        if is_own_fault(error):
            raise
        return FirstSamplesAnswer(decision)
    if rows is None:
        return FirstSamplesAnswer(decision, facts=facts)
    decided = replace(decision, rows=rows, method=Method.FLOAT64_PART, part=part.sizes, needs_float64=False)
    return FirstSamplesAnswer(decision, decided, facts)


def _part_of(measurement: Measurement, decision: Decision) -> Experiment | None:
    """The first samples as a batch of their own; None where a part would not be like the whole, or not worth it.

    A weighting in words means the same in a part; numbers and functions of the user's may not.
    """
    experiment = measurement.experiment
    first, last = experiment.sizes[0], experiment.sizes[-1]
    size = min(first, max(_LEAST, first // _QUARTER), _MOST)
    sizes = (size, size if last == first else max(1, size - 1))
    is_float32 = measurement.coarse_unit == U32 and experiment.autocast is None
    plain = isinstance(experiment.weighting, str) and (decision.few is not None or is_float32)
    comparable = all(row.why in (None, NotCompared.UNUSED) for row in decision.rows)
    if not plain or not comparable or 2 * sum(sizes) > experiment.batch_size or not is_worth_a_part(experiment):
        return None
    return experiment.first_samples(sizes)


def _judge_part(
    part: Experiment, measurement: Measurement, decision: Decision, make_watch: MakeWatch | None
) -> tuple[Measurement, Decision]:
    """Judges the part; by float64 alone in float32, where what working precision makes of it is known from the whole.

    Its draws are dealt in the reading that was right for the whole.
    """
    whole = measurement.experiment
    if decision.few is not None:  # below float32, float64 of the part alone tells
        return measure_and_decide(part, exact=True, make_watch=make_watch)
    recorded = part.record()[0] if whole.draws.count else part
    if whole.reading.by_contents:
        recorded = recorded.with_second_reading()
    control = run_in_float64(recorded, make_watch)
    losses = (control.full.loss, *control.accumulated.micro_losses)
    # the second reading is chosen only where the first one was ambiguous
    is_ambiguous = whole.reading.by_contents or measurement.accumulated.draws.ambiguous
    if control.accumulated.draws.ambiguous > is_ambiguous or not all(map(math.isfinite, losses)):
        return measure_and_decide(part, make_watch=make_watch)
    # what working precision makes of the part is worked out from what it makes of the whole
    scale = _norm(control.rows.values()) / max(_norm(measurement.differences.values()), TINY)
    working = {name: row._replace(difference=scale * row.difference) for name, row in measurement.differences.items()}
    scales = {name: scale * terms for name, terms in measurement.plain_terms.items()}
    estimated = Measurement(recorded, control.full, control.accumulated, working, plain_terms=scales)
    open_decision = Decision((), Method.FLOAT64_CONTROL, needs_float64=True)
    part_decision = decide_by_float64(estimated, open_decision, control, measurement.coarse_unit)
    # an estimate decides nothing else: whoever needs working precision of the part measures it
    return Measurement(recorded, control.full, control.accumulated, {}), part_decision


def _decide_by_part(
    measurement: Measurement, decision: Decision, part: Measurement, part_decision: Decision
) -> tuple[ParameterComparison, ...] | None:
    """The records of all parameters, where the part and the whole batch show the same; None where one does not."""
    if part_decision.float64 is None:
        return None
    part_rows, unit = {row.name: row for row in part_decision.rows}, measurement.coarse_unit
    # What comes of the samples' differences falls with the square root of their number.
    order = SAME_ORDER * math.sqrt(measurement.experiment.sizes[0] / part.experiment.sizes[0])
    rounds = _rounding_of(measurement, part, part_decision)
    rows = []
    for row in decision.rows:
        difference, part_row = measurement.differences[row.name], part_rows[row.name]
        decided = row if row.why is part_row.why is NotCompared.UNUSED else None
        if row.why is None and part_row.why is None:
            least = SHOWS_UNITS * unit if decision.few is None else 0.0
            decided = _alike(row, difference, part_row, rounds, least, order)
        if decided is None:
            return None
        rows.append(decided)
    return tuple(rows) if any(row.outcome is Outcome.DIVERGENT for row in rows) else None


def _rounding_of(measurement: Measurement, part: Measurement, part_decision: Decision) -> Callable[[str], float]:
    """How far working precision may round the whole batch's gradient of a parameter that is equivalent in the part."""
    unit, norm = measurement.coarse_unit, _norm(measurement.differences.values())
    zero = zero_in_float64(row.reference_norm for row in part_decision.rows)
    nothing = {row.name for row in part_decision.rows if max(row.reference_norm, row.accumulated_norm) <= zero}
    part_differences: dict[str, Difference] = dict(part.differences)

    def rounding(name: str) -> float:
        # a gradient that is zero: what shifts the logits of a softmax rounds like the gradients behind it
        if name in nothing and measurement.differences[name].scale <= FEW_UNITS * unit * norm:
            return FEW_UNITS * unit * norm
        if not part_differences:
            part_differences.update(_measure_in_working_precision(part.experiment))
        return FEW_TIMES * norm / max(_norm(part_differences.values()), TINY) * part_differences[name].difference

    return rounding


def _measure_in_working_precision(part: Experiment) -> dict[str, Difference]:
    full = part.full_batch()
    accumulated = part.micro_batches(full)
    return {row.name: row for row in measure(accumulated.gradients, full.gradients, part.ranks)}


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
