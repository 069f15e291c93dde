"""Decides every parameter of a measurement: in working precision, by float64, or by the noise of moved weights."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from gaverify.passes.experiment import Experiment
from gaverify.passes.precision import short_name, unit_roundoff
from gaverify.records.findings import Finding
from gaverify.records.outcomes import (
    FewSamples,
    Method,
    NotCompared,
    Outcome,
    ParameterComparison,
    PrecisionLoss,
    outcome_of,
    resolution_of,
)
from gaverify.thresholds import SHOWS_UNITS, TENTH, U32, U64
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import by_tolerance
from gaverify.verdict.control import (
    Float64Run,
    MakeWatch,
    decide_open_rows,
    failure_sentence,
    float64_floor,
    judge_by_float64,
    judge_by_floor,
    judge_few_samples,
    noise_floor,
    precision_loss,
    run_in_float64,
)
from gaverify.verdict.criteria import decide_at_once, floors_wanted, not_compared, record
from gaverify.verdict.measurement import Measurement, measure_strategies, shows_divergence


@dataclass(frozen=True)
class Decision:
    """The decision about every parameter, and its method."""

    rows: tuple[ParameterComparison, ...]
    """One comparison per parameter."""
    method: Method
    """The method that decided the rows."""
    needs_float64: bool = False
    """Working precision could not tell, or float64 was asked for: `decide_open` has to decide."""
    exceeds_rounding: bool = False
    """The difference of an open decision is clearly more than rounding, so that a diagnosis is to be expected."""
    float64: Float64Run | None = None
    """The float64 runs; None: none was needed, or it failed."""
    float64_failure: str = ""
    """Why the float64 run was impossible, as a sentence; empty: it ran, or was not needed."""
    precision: PrecisionLoss | None = None
    """Relative gradient errors against float64 where parameters are below float32; None: not measured."""
    few: FewSamples | None = None
    """The rounding below float32 that a few samples showed; None: not measured, or too imprecise."""
    part: tuple[int, ...] = ()
    """Micro-batch sizes of the part of the batch that decided, or showed the cause; empty: the full batch."""

    @property
    def is_divergent(self) -> bool:
        """Whether any parameter is."""
        return any(row.outcome is Outcome.DIVERGENT for row in self.rows)

    @property
    def resolution(self) -> float:
        """The smallest relative difference that the deciding method could have seen."""
        return resolution_of(self.rows)

    def leave_open(self) -> Decision:
        """Returns it with every difference undecided: something else than accumulation may have made it."""
        rows = [
            row._replace(outcome=Outcome.INCONCLUSIVE) if row.outcome is Outcome.DIVERGENT else row for row in self.rows
        ]
        return replace(self, rows=tuple(rows))

    def outcome(self, findings: tuple[Finding, ...]) -> Outcome:
        """The verdict of all parameters together."""
        faults = any(finding.severity == "fault" for finding in findings)
        return Outcome.DIVERGENT if faults else outcome_of(self.rows)


def measure_and_decide(
    experiment: Experiment, *, exact: bool = False, keep_gradients: bool = False, make_watch: MakeWatch | None = None
) -> tuple[Measurement, Decision]:
    """Runs both strategies and decides every parameter, in float64 on all of the batch where that is needed.

    Args:
        experiment: The experiment to run.
        exact: In float64 whatever working precision says; where a kernel has none, the answer is what it would have
            been without, and `float64_failure` says so.
        keep_gradients: Keep those of working precision.
        make_watch: Makes what looks on at the float64 runs where a diagnosis is to be expected.

    Raises:
        ProblemError: The loss of the full batch is not finite, or the user's code raised.
    """
    measurement = measure_strategies(experiment, with_sketch=not exact and not experiment.on_ranks)
    measured_at = time.perf_counter()
    decision = decide(measurement, exact=exact)
    if not keep_gradients and not needs_gradients(measurement, decision):
        measurement.free_gradients()
    if decision.needs_float64:
        decision = decide_open(measurement, decision, exact=exact, make_watch=make_watch)
        if not keep_gradients:
            measurement.free_gradients()
    if exact and decision.float64_failure:
        failure, experiment = decision.float64_failure, measurement.experiment
        del measurement, decision  # their gradients take the memory of the next passes
        measurement, decision = measure_and_decide(experiment, keep_gradients=keep_gradients, make_watch=make_watch)
        return measurement, replace(decision, float64_failure=decision.float64_failure or failure)
    measurement.seconds["control"] = time.perf_counter() - measured_at
    return measurement, decision


def needs_gradients(measurement: Measurement, decision: Decision) -> bool:
    """Whether a run in float64 still measures what adding up loses: from sketches it was read already."""
    is_low = unit_roundoff(measurement.dtype) > U32 and not measurement.experiment.on_ranks
    return decision.needs_float64 and is_low and measurement.window is None and measurement.has_gradients


def rounded_products_leave_rows_open(measurement: Measurement) -> bool:
    """Whether float32 whose products are rounded (TF32) decides not all, so that float32 without that rounding may."""
    # The cheap question first: most models round no products, or are below float32 anyway.
    if not measurement.unit <= U32 < measurement.coarse_unit:
        return False
    rows = decide_at_once(measurement.differences.values(), measurement.unit, measurement.terms)
    return any(row.outcome is not Outcome.EQUIVALENT and row.method != Method.NOT_COMPARED for row in rows)


def name_float32_runs(decision: Decision, measurement: Measurement) -> Decision:
    """The decision of runs in float32 that the user's own precision could not make: its rows say so."""
    differences = measurement.in_users_precision.differences

    def name(method: Method) -> Method:
        return Method.FLOAT32_RUNS if method == Method.WORKING_PRECISION else method

    rows = tuple(
        row._replace(method=name(row.method), working_difference_norm=differences[row.name].difference)
        for row in decision.rows
    )
    precision = decision.precision or measurement.precision
    return replace(decision, rows=rows, method=name(decision.method), precision=precision)


def decide_by_tolerance(measurement: Measurement, rtol: float, atol: float) -> Decision:
    """Decides by |actual − expected| ≤ atol + rtol · |expected|, in working precision alone."""
    differences = list(measurement.differences.values())
    gradients = measurement.accumulated.gradients, measurement.full.gradients
    return Decision(tuple(by_tolerance(differences, *gradients, rtol, atol)), Method.TOLERANCE)


def decide(measurement: Measurement, *, exact: bool = False) -> Decision:
    """Decides what working precision can tell, with a few samples in float64 where these are enough.

    Args:
        measurement: In working precision.
        exact: Leave it to float64, where that is finer.

    Returns:
        A decision; where it `needs_float64`, its rows are what working precision told so far.
    """
    # Not the coarse unit: products whose inputs are rounded to TF32 mostly agree to float32's rounding all the same.
    unit, differences = measurement.unit, measurement.differences.values()
    decision = Decision(tuple(decide_at_once(differences, unit, measurement.terms)), Method.WORKING_PRECISION)
    if unit <= U32 and not (exact and unit > U64):
        closed = _close_rows(measurement, decision)
        if closed is not None:
            return closed
    decision = replace(decision, needs_float64=True)
    # in float32 the window is there for the search alone
    if unit > U32 and measurement.window is not None:
        decision = _decide_from_window(measurement, decision)
    if not decision.needs_float64 or decision.exceeds_rounding:
        return decision
    return replace(decision, exceeds_rounding=unit > U64 and shows_divergence(measurement, measurement.coarse_unit))


def _close_rows(measurement: Measurement, decision: Decision) -> Decision | None:
    """The decision where working precision decides all, or two samples the few that it leaves open; else None."""
    open_rows = [
        measurement.differences[row.name]
        for row in decision.rows
        if row.outcome is Outcome.INCONCLUSIVE and row.method != Method.NOT_COMPARED
    ]
    if not open_rows:
        return decision
    # In float64 there is nothing finer that two samples could be run in.
    if measurement.coarse_unit <= U64 or measurement.experiment.on_ranks:
        return None
    decided_rows = decide_open_rows(measurement, open_rows)
    if decided_rows is None:
        return None
    decided = {row.name: row for row in decided_rows}
    rows = tuple(decided.get(row.name, row) for row in decision.rows)
    return replace(decision, rows=rows, method=Method.TWO_SAMPLES)


def _decide_from_window(measurement: Measurement, decision: Decision) -> Decision:
    """Decides by the window's weights and a few samples; `needs_float64` stays unless they show equivalence."""
    rows = list(measurement.differences.values())
    if any(row.why not in (None, NotCompared.UNUSED) for row in rows):
        return decision
    try:
        few_samples = judge_few_samples(measurement)
    except Exception as error:  # single samples that the model does not take, a kernel without float64
        if is_own_fault(error):
            raise
        return decision
    if few_samples is None:
        return decision
    outcome, few = few_samples
    # A fault that the samples show in float32 is one, however coarse the user's precision is.
    shows = few.structure > SHOWS_UNITS * U32
    if few.allowed > TENTH and not shows:
        return decision
    decision = replace(decision, few=few, exceeds_rounding=shows or outcome is Outcome.DIVERGENT)
    if unit_roundoff(measurement.dtype) > U32:
        lost = math.hypot(few.error, few.lost)
        loss = PrecisionLoss(short_name(measurement.dtype), few.error, lost, samples=few.samples)
        decision = replace(decision, precision=loss)
    if outcome is not Outcome.EQUIVALENT:
        return decision
    # Below float32 a single parameter shows little: each is allowed what the whole gradient is.
    allowed = few.allowed * math.hypot(*(row.reference for row in rows if math.isfinite(row.reference)))
    equivalent = tuple(
        not_compared(row)
        if row.why is not None
        else record(row, Outcome.EQUIVALENT, Method.FEW_SAMPLES, allowed, row.difference)
        for row in rows
    )
    return replace(decision, rows=equivalent, method=Method.FEW_SAMPLES, needs_float64=False)


def decide_open(
    measurement: Measurement, decision: Decision, *, exact: bool = False, make_watch: MakeWatch | None = None
) -> Decision:
    """Decides what working precision left open, by float64 on all of the batch; by the noise floor where there is none.

    Args:
        measurement: In working precision.
        decision: The one that working precision allows.
        exact: Only float64 is asked for: where it is impossible the decision stays as it is, and says why.
        make_watch: Makes what looks on at the float64 runs where a diagnosis is to be expected.
    """
    unit, experiment = measurement.coarse_unit, measurement.experiment
    if measurement.unit > U64:
        began, float64_run, failure, raised = time.perf_counter(), None, "", None
        try:
            watch, keeps = make_watch if decision.exceeds_rounding else None, needs_gradients(measurement, decision)
            float64_run = run_in_float64(experiment, watch, keep_gradients=keeps)
            # A kernel without float64 does not always say so: some read a wrong number of bytes.
            float64_run.check_losses(measurement.full, measurement.accumulated)
        except Exception as error:
            if is_own_fault(error):
                raise
            failure, raised = failure_sentence(error), error
        failure = experiment.agree_on_control(failure, raised, time.perf_counter() - began)
        if float64_run is not None and not failure:
            if keeps:
                decision = replace(decision, precision=precision_loss(measurement, float64_run))
                float64_run.accumulated.gradients = dict.fromkeys(float64_run.accumulated.gradients)
            return decide_by_float64(measurement, decision, float64_run, unit)
        decision = replace(decision, float64_failure=failure)
        if exact:
            return decision
    # Run once more: the gradients of the measurement were freed, and the moved runs are compared with them.
    with experiment.as_reference() as reference:
        floor = noise_floor(reference, reference.full_batch(), unit)
    rows = judge_by_floor(measurement.differences, floor, measurement.plain_terms, unit)
    return replace(decision, rows=tuple(rows), method=Method.NOISE_FLOOR, needs_float64=False)


def decide_by_float64(measurement: Measurement, decision: Decision, float64_run: Float64Run, unit: float) -> Decision:
    """Decides every parameter by a run in float64, with its noise floor where only that can tell.

    Args:
        measurement: In working precision.
        decision: The one that working precision allows; its rows are replaced.
        float64_run: Both strategies in float64.
        unit: Unit roundoff of the working precision.
    """
    working, scales = measurement.differences, measurement.plain_terms
    rows = judge_by_float64(working, float64_run, scales, unit)
    # A gradient that is zero in exact arithmetic (attention's key bias) differs by 0.02 to 3 of itself in float64, too.
    if floors_wanted(rows):
        floor = float64_floor(measurement.experiment, float64_run)
        rows = judge_by_float64(working, float64_run, scales, unit, floor)
    return replace(decision, rows=tuple(rows), method=Method.FLOAT64_CONTROL, float64=float64_run, needs_float64=False)
