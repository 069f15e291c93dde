"""Decides and searches a divergence on the first samples: float64 and the search cost twice the memory.

A fault of structure shows in any few samples. Where working precision shows clearly more than rounding, the first
samples of the batch, cut into two micro-batches, are measured like a batch. Their result counts only where every
parameter agrees with it on the full batch in working precision; else float64 runs on the full batch. Below float32 one
parameter shows little: there the gradient of all parameters has shown the divergence (`verdict/window`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gaverify.passes.experiment import Experiment
from gaverify.records.comparison import Method, NotCompared, Outcome, ParameterComparison
from gaverify.records.facts import Facts
from gaverify.search.investigation import investigate, watch_passes
from gaverify.thresholds import FEW_TIMES, FEW_UNITS, SAME_ORDER, SHOWS_UNITS, TINY, U32
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import measure
from gaverify.verdict.control import MakeWatch, run_in_float64
from gaverify.verdict.criteria import Difference, record, zero_in_float64
from gaverify.verdict.decision import Decision, decide_by_float64, measure_and_decide
from gaverify.verdict.measurement import Measurement, is_large

# Sizes of the two micro-batches: a quarter of the first micro-batch, at least two samples, and no more than 1,024,
# which show a fault as well as any larger number.
_QUARTER, _LEAST, _MOST = 4, 2, 1024


@dataclass(frozen=True)
class FirstSamplesAnswer:
    """The results of the first samples, which were measured, decided and searched instead of the whole batch."""

    open_decision: Decision
    """The decision in the user's precision, which is open."""
    decision: Decision | None = None
    """The parameters of the whole batch, decided by the first samples; None where these decide nothing."""
    facts: Facts | None = None
    """The facts of the search in the first samples; None where they were not searched."""


def examine_first_samples(measurement: Measurement, decision: Decision, *, searches: bool) -> FirstSamplesAnswer:
    """Measures, decides and searches the first samples in float64, in the place of the whole batch.

    First samples that diverge are searched even if they decide nothing; float64 then decides the whole batch.

    Args:
        measurement: Of the whole batch, in working precision.
        decision: The open decision from that measurement.
        searches: Whether to look for the cause of a divergence.
    """
    facts = None
    try:
        part = _take_first_samples(measurement, decision)
        if part is None:
            return FirstSamplesAnswer(decision)
        part.progress(f"a part of the batch: {part.batch_size} samples")
        part_answer = _judge_first_samples(part, measurement, decision, watch_passes if searches else None)
        rows = _decide_by_first_samples(measurement, decision, *part_answer)
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


def _take_first_samples(measurement: Measurement, decision: Decision) -> Experiment | None:
    """The experiment with the first samples as its batch; None where they are unlike the whole, or save little."""
    experiment = measurement.experiment
    first, last = experiment.sizes[0], experiment.sizes[-1]
    size = min(first, max(_LEAST, first // _QUARTER), _MOST)
    sizes = (size, size if last == first else max(1, size - 1))
    is_float32 = measurement.coarse_unit == U32 and experiment.autocast is None
    # a weighting in words has the same meaning for any samples; numbers and functions of the user's may not
    plain = isinstance(experiment.weighting, str) and (decision.few is not None or is_float32)
    comparable = all(row.why in (None, NotCompared.UNUSED) for row in decision.rows)
    if not plain or not comparable or 2 * sum(sizes) > experiment.batch_size or not is_large(experiment):
        return None
    return experiment.first_samples(sizes)


def _judge_first_samples(
    part: Experiment, measurement: Measurement, decision: Decision, make_watch: MakeWatch | None
) -> tuple[Measurement, Decision]:
    """Measures and decides the first samples: in float64 only, where their own result follows from the whole's."""
    full_experiment = measurement.experiment
    is_low = decision.few is not None  # below float32 only float64 decides them
    recorded = part.record()[0] if full_experiment.draws.count else part
    if full_experiment.reading.by_contents:  # what was right for the draws of the whole batch is right for these
        recorded = recorded.with_second_reading()
    control = run_in_float64(recorded, make_watch)
    losses = (control.full.loss, *control.accumulated.micro_losses)
    # the second reading is chosen only where the first one was ambiguous
    is_ambiguous = full_experiment.reading.by_contents or measurement.accumulated.draws.ambiguous
    if control.accumulated.draws.ambiguous > is_ambiguous or not all(map(math.isfinite, losses)):
        return measure_and_decide(part, exact=is_low, make_watch=make_watch)
    # Working precision is not run on the first samples: its differences are those of the whole batch, to scale.
    scale = _norm(control.rows.values()) / max(_norm(measurement.differences.values()), TINY)
    working = {name: row._replace(difference=scale * row.difference) for name, row in measurement.differences.items()}
    scales = {name: scale * terms for name, terms in measurement.plain_terms.items()}
    estimated = Measurement(recorded, control.full, control.accumulated, working, plain_terms=scales)
    open_decision = Decision((), Method.FLOAT64_CONTROL, needs_float64=True)
    part_decision = decide_by_float64(estimated, open_decision, control, measurement.coarse_unit)
    # without the estimated differences, which must decide nothing else
    return Measurement(recorded, control.full, control.accumulated, {}), part_decision


def _decide_by_first_samples(
    measurement: Measurement, decision: Decision, part: Measurement, part_decision: Decision
) -> tuple[ParameterComparison, ...] | None:
    """The records of all parameters, where the first samples and the whole batch agree; None where they do not."""
    if part_decision.float64 is None:
        return None
    part_rows, unit = {row.name: row for row in part_decision.rows}, measurement.coarse_unit
    # A fault that comes from the samples' differences falls with the square root of their number.
    order = SAME_ORDER * math.sqrt(measurement.experiment.sizes[0] / part.experiment.sizes[0])
    rounds = _bound_rounding(measurement, part, part_decision)
    rows = []
    for row in decision.rows:
        difference, part_row = measurement.differences[row.name], part_rows[row.name]
        decided = row if row.why is part_row.why is NotCompared.UNUSED else None
        if row.why is None and part_row.why is None:
            least = SHOWS_UNITS * unit if decision.few is None else 0.0
            decided = _decide_parameter(row, difference, part_row, rounds, least, order)
        if decided is None:
            return None
        rows.append(decided)
    return tuple(rows) if any(row.outcome is Outcome.DIVERGENT for row in rows) else None


def _bound_rounding(measurement: Measurement, part: Measurement, part_decision: Decision) -> Callable[[str], float]:
    """How much working precision may round the whole batch's gradient of a parameter that is equivalent in float64."""
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


def _decide_parameter(
    row: ParameterComparison,
    whole: Difference,
    part: ParameterComparison,
    rounds: Callable[[str], float],
    least: float,
    order: float,
) -> ParameterComparison | None:
    """The record of a parameter on which the first samples (float64) and the whole batch (working precision) agree."""
    if part.outcome is Outcome.EQUIVALENT:
        if row.outcome is Outcome.EQUIVALENT:
            return row
        rounding = rounds(row.name)
        if whole.difference > rounding:
            return None
        return record(whole, Outcome.EQUIVALENT, Method.FLOAT64_PART, rounding, whole.difference)
    most = max(least, part.relative_difference / order)
    if part.outcome is not Outcome.DIVERGENT or not whole.difference > most * whole.reference:
        return None
    allowed = part.relative_allowed * whole.reference
    return record(whole, Outcome.DIVERGENT, Method.FLOAT64_PART, allowed, whole.difference)


def _norm(rows: Iterable[Difference]) -> float:
    return math.hypot(*(row.reference for row in rows if math.isfinite(row.reference)))
