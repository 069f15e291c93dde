"""Decides every parameter: working precision first, then the float64 control, then the noise floor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from gaverify.errors import ProblemError
from gaverify.passes.gradients import PassResult, accumulated_gradients, full_batch_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.precision import coarsest_unit, rounded_products, rounded_unit, short_name, unit_roundoff
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task, TimeUp
from gaverify.passes.terms import Terms
from gaverify.records.comparison import (
    FewSamples,
    Method,
    NotCompared,
    Outcome,
    ParameterComparison,
    PrecisionLoss,
    outcome_of,
    relative_total,
    resolution_of,
)
from gaverify.records.findings import Finding
from gaverify.thresholds import SHOWS_UNITS, TENTH, U32, U64
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import by_tolerance, measure
from gaverify.verdict.control import (
    Control,
    Listener,
    Measured,
    control_floor,
    failure_sentence,
    float64_control,
    judge_by_control,
    judge_by_floor,
    lowest_precision,
    noise_floor,
    precision_loss,
)
from gaverify.verdict.criteria import Difference, decide_at_once, floors_wanted, not_compared, record
from gaverify.verdict.non_finite import first_non_finite
from gaverify.verdict.sketches import Earlier, GradientSketches, Sketches, sketch_full_batch, window_of
from gaverify.verdict.window import decide_open_rows, judge_few_samples, worth


@dataclass
class Judgement:
    """What was decided, by which method, and the passes that it rests on."""

    rows: list[ParameterComparison]
    """One decided comparison per parameter; empty until the first decision."""
    method: Method
    """The method that decided the rows."""
    full: PassResult
    """The full-batch pass; its gradients are None once measured, unless they are kept."""
    accumulated: PassResult
    """The micro-batches' pass; its gradients are None once measured, unless they are kept."""
    record: DrawRecord
    """Random draws of the full-batch pass, which the micro-batches got."""
    state: ModelState
    """The model's state that every pass starts from."""
    dtype: torch.dtype
    """Least precise dtype among the trainable parameters."""
    working: dict[str, Difference]
    """Parameter name → gradient norms and their difference, in working precision."""
    terms: dict[str, float]
    """Parameter name → 2-norm of Σ|terms| of its gradient's sum; empty where none was seen."""
    scales: dict[str, float]
    """The entries of `terms` whose operation was a plain sum."""
    control: Control | None = None
    """The float64 runs; None: none was needed, or it failed."""
    control_failure: str = ""
    """Why the float64 control was impossible, as a sentence; empty: it ran, or was not needed."""
    precision: PrecisionLoss | None = None
    """Relative gradient errors against float64 where parameters are below float32; None: not measured."""
    rounded: dict[str, str] = field(default_factory=dict)
    """Kind of product → format that its float32 inputs are rounded to; empty: none is rounded."""
    part: tuple[int, ...] = ()
    """Micro-batch sizes of the part of the batch that decided, or showed the cause; empty: the full batch."""
    earlier: Earlier | None = None
    """Sketch of the full batch's gradient, with the micro-batches' below float32; None: no diagnosis expected."""
    few: FewSamples | None = None
    """What a few samples showed of the rounding below float32; None: not measured, or too imprecise."""
    timings: dict[str, float] = field(default_factory=dict)
    """Phase → seconds."""

    @property
    def is_divergent(self) -> bool:
        """Whether any parameter is."""
        return any(row.outcome is Outcome.DIVERGENT for row in self.rows)

    @property
    def resolution(self) -> float:
        """The smallest relative difference that the deciding method could have seen."""
        return resolution_of(self.rows)

    def outcome(self, findings: tuple[Finding, ...]) -> Outcome:
        """The verdict of all parameters together."""
        faults = any(finding.severity == "fault" for finding in findings)
        return Outcome.DIVERGENT if faults else outcome_of(self.rows)


Part = Callable[[Task, Judgement, float], bool]
"""Decides the parameters of a judgement by a part of the batch, given its unit roundoff; says whether that told."""


def judge(
    task: Task,
    *,
    rtol: float | None,
    atol: float | None,
    keep_gradients: bool = False,
    exact: bool = False,
    listener: Listener | None = None,
    part: Part | None = None,
) -> Judgement:
    """Runs both strategies and decides every parameter; `exact`: in float64 whatever working precision says.

    Where a kernel has no float64, `exact` changes nothing but that `control_failure` says so.

    Where working precision shows more than rounding, a `part` of the batch is asked to decide before the float64
    control of all of it, and a `listener` listens to that.

    Raises:
        ProblemError: The loss of the full batch is not finite, or the user's code raised.
    """
    started = time.perf_counter()
    state = ModelState(task.modules, (task.problem.loss,))
    task.progress("the full batch")
    task, full, record = _record_full_batch(task, state)
    full_at = time.perf_counter()
    if not math.isfinite(full.loss):
        raise ProblemError(
            f"the loss of the full batch is {full.loss}; a gradient of it proves nothing: "
            "check the inputs, the targets (are all ignored?) and the learning state"
            + (f"; {where}" if (where := first_non_finite(task, state, record)) else "")
        )
    coarse = max(working_unit(task, full), rounded_unit(_rounded_product_kinds(task, full)))
    asked = rtol is None and not exact and task.strategy == "accumulate" and task.steps > 1
    listens = coarse > U32 and asked and worth(task)

    def accumulate() -> _Accumulated:
        sketches = GradientSketches(task)
        with sketches.listening() if listens else nullcontext() as note:
            accumulated = accumulated_gradients(task, state, record, full, after_backward=note)
        rows = measure(accumulated.gradients, full.gradients, located=rtol is not None)
        return _Accumulated(accumulated, sketches, rows)

    accumulation = accumulate()
    accumulated_at = time.perf_counter()
    if record.ambiguous and not _agree(working_unit(task, full, accumulation.accumulated), accumulation.measured):
        accumulation = _other_reading(record, accumulation, accumulate)
    accumulated, gradient_sketches, measured = accumulation
    if rtol is not None and atol is not None:
        rows = by_tolerance(measured, accumulated.gradients, full.gradients, rtol, atol)
    judgement = Judgement(
        [],
        Method.WORKING_PRECISION,
        full,
        accumulated,
        record,
        state,
        lowest_precision(task),
        {row.name: row for row in measured},
        *_on_host(full.terms),
    )
    window = window_of(full, accumulated, gradient_sketches) if gradient_sketches.taken else None
    if window is not None or (asked and part is not None and _divergence_shows(task, measured, coarse)):
        judgement.earlier = sketch_full_batch(full, window)
    # What adding up loses is read from the window's sketches, where there are any.
    low = unit_roundoff(judgement.dtype) > U32 and rtol is None and window is None
    both_gradients = (full.gradients, accumulated.gradients) if low else None
    if not keep_gradients:
        _drop(full)
        _drop(accumulated)
    judgement.timings = {
        "full_batch": full_at - started,
        "accumulated": accumulated_at - full_at,
        "comparison": time.perf_counter() - accumulated_at,
    }
    if rtol is not None:
        judgement.rows, judgement.method = rows, Method.TOLERANCE
        return judgement
    _decide(task, judgement, exact, listener, None if exact else part)
    if exact and judgement.control_failure:  # then the answer is what it would have been without `exact`
        failure = judgement.control_failure
        del accumulation, accumulated, full, both_gradients  # their gradients take the memory of the next passes
        judgement = judge(task, rtol=None, atol=None, keep_gradients=keep_gradients, listener=listener, part=part)
        judgement.control_failure = judgement.control_failure or failure
        return judgement
    if both_gradients is not None and judgement.control is not None:
        passes = Measured(judgement.full, record, state)
        judgement.precision = precision_loss(task, passes, judgement.control.full.gradients, *both_gradients)
    judgement.timings["control"] = time.perf_counter() - accumulated_at - judgement.timings["comparison"]
    return judgement


def _record_full_batch(task: Task, state: ModelState) -> tuple[Task, PassResult, DrawRecord]:
    """The full-batch pass; once more on unfused kernels where draws were made inside a fused one."""
    full, record = full_batch_gradients(task, state)
    if record.fused and not task.math_kernels:
        task.math_kernels = True
        full, record = full_batch_gradients(task, state)
    return task, full, record


def working_unit(task: Task, *passes: PassResult) -> float:
    """Returns the unit roundoff of the coarsest arithmetic that gradients were computed in during some passes."""
    carried = (dtype for result in passes for observed in result.observed for dtype in observed.arithmetic.dtypes)
    return coarsest_unit([*(parameter.dtype for parameter in task.parameters.values()), task.autocast, *carried])


def _agree(unit: float, measured: list[Difference]) -> bool:
    """Whether all gradients are equal within float32's rounding at least: then no draw went to the wrong sample."""
    if unit > U32:
        return False
    return all(row.outcome is Outcome.EQUIVALENT for row in decide_at_once(measured, unit, {}))


class _Accumulated(NamedTuple):
    """The micro-batches' pass, what listened to it, and how it differs from the full batch."""

    accumulated: PassResult
    sketches: GradientSketches
    measured: list[Difference]

    @property
    def total(self) -> float:
        """The differences that could be measured, added up."""
        return sum(row.difference for row in self.measured if math.isfinite(row.difference))


def _other_reading(record: DrawRecord, first: _Accumulated, accumulate: Callable[[], _Accumulated]) -> _Accumulated:
    """Deals the draws out in the second reading (`randomness`), and keeps it where it brings the gradients closer.

    Only the right reading can make the gradients of an equivalent model agree.
    """
    unaligned = dict(record.unaligned)
    record.inner = True
    # numbers that were not meant for these samples may raise: indices out of range, for example
    with suppress(ProblemError):
        second_accumulation = accumulate()
        if second_accumulation.total < first.total:
            return second_accumulation
    record.inner, record.unaligned = False, unaligned
    return first


def _on_host(terms: Mapping[str, Terms]) -> tuple[dict[str, float], dict[str, float]]:
    """Σ|terms| of all sums and of plain ones, fetched from each device at once: each fetch is a synchronisation."""
    devices: dict[torch.device, list[str]] = {}
    for name, term_values in terms.items():
        devices.setdefault(term_values.scale.device, []).append(name)
    numbers: dict[str, float] = {}
    for names in devices.values():
        values = torch.stack([terms[name].scale.double() for name in names]).tolist()
        numbers |= dict(zip(names, values, strict=True))
    return numbers, {name: number for name, number in numbers.items() if terms[name].plain}


def _drop(result: PassResult) -> None:
    """Frees the gradients once they are measured, before a control needs the memory."""
    result.gradients = dict.fromkeys(result.gradients)


def judge_whole(task: Task, judgement: Judgement, listener: Listener | None) -> None:
    """Decides every parameter again, without a part of the batch: what that showed was not confirmed.

    Raises:
        TimeUp: The search has had its time; then what had been decided stays.
    """
    decided = vars(judgement).copy()
    judgement.part = ()
    try:
        _decide(task, judgement, False, listener, None)
    except TimeUp:
        vars(judgement).update(decided)
        raise


def _decide(task: Task, judgement: Judgement, exact: bool, listener: Listener | None, part: Part | None) -> None:
    unit = working_unit(task, judgement.full, judgement.accumulated)
    judgement.rounded |= _rounded_product_kinds(task, judgement.full, judgement.accumulated)
    # What agrees to float32's own rounding does so however products are rounded; what is left open is judged by theirs.
    coarse = max(unit, rounded_unit(judgement.rounded))
    rows = list(judgement.working.values())
    judgement.rows = decide_at_once(rows, unit, judgement.terms)
    if unit <= U32 and not (exact and unit > U64) and _decide_in_working_precision(task, judgement, coarse):
        return
    window = judgement.earlier.shares if judgement.earlier is not None else None
    window_outcome = _decide_from_window(task, judgement, window) if window is not None else Outcome.INCONCLUSIVE
    if window_outcome is Outcome.EQUIVALENT:
        return
    if unit > U64:
        shows = window_outcome is Outcome.DIVERGENT or _divergence_shows(task, rows, coarse)
        if shows and part is not None and part(task, judgement, coarse):
            return
        if _decide_by_float64(task, judgement, coarse, listener if shows else None) or exact:
            return
    full = full_batch_gradients(task, judgement.state, judgement.record)[0]
    floor = noise_floor(task, judgement.state, judgement.record, full, coarse)
    judgement.rows = judge_by_floor(judgement.working, floor, judgement.scales, coarse)
    judgement.method = Method.NOISE_FLOOR


def _decide_by_float64(task: Task, judgement: Judgement, unit: float, listener: Listener | None) -> bool:
    """Whether the float64 control decided; why it was impossible is noted where it was."""
    try:
        control = float64_control(task, judgement.state, judgement.record, listener)
        control.check_losses(judgement.full, judgement.accumulated)
    except Exception as error:
        if is_own_fault(error):
            raise
        judgement.control_failure = failure_sentence(error)
        return False
    decide_by_control(task, judgement, control, unit)
    return True


def decide_by_control(task: Task, judgement: Judgement, control: Control, unit: float) -> None:
    """Decides every parameter of a judgement by a float64 control, with its noise floor where only that can tell.

    Args:
        task: What was run.
        judgement: In working precision; its rows are replaced.
        control: The float64 runs.
        unit: Unit roundoff of the working precision.
    """
    judgement.control, judgement.method = control, Method.FLOAT64_CONTROL
    judgement.rows = judge_by_control(judgement.working, control, judgement.scales, unit)
    if floors_wanted(judgement.rows):
        floor = control_floor(task, judgement.state, judgement.record, control)
        judgement.rows = judge_by_control(judgement.working, control, judgement.scales, unit, floor)


def _rounded_product_kinds(task: Task, *passes: PassResult) -> dict[str, str]:
    """The kinds of products that ran in some passes and round their float32 inputs, and to what."""
    products = {kind for result in passes for kind in result.observed[0].arithmetic.products}
    if lowest_precision(task) is not torch.float32:
        return {}
    return {kind: to for device in task.devices for kind, to in rounded_products(device, products).items()}


def _decide_from_window(task: Task, judgement: Judgement, window: Sketches) -> Outcome:
    """What the window's weights and a few samples show of it; the rows are decided where it is equivalent."""
    rows = list(judgement.working.values())
    if any(row.why not in (None, NotCompared.UNUSED) for row in rows):
        return Outcome.INCONCLUSIVE
    try:
        few_samples = judge_few_samples(task, judgement.state, judgement.record, judgement.full, window)
    except Exception as error:  # single samples that the model does not take, a kernel without float64
        if is_own_fault(error):
            raise
        return Outcome.INCONCLUSIVE
    if few_samples is None or few_samples[1].allowed > TENTH:
        return Outcome.INCONCLUSIVE
    outcome, few = few_samples
    judgement.few = few
    if unit_roundoff(judgement.dtype) > U32:
        lost = math.hypot(few.error, few.lost)
        judgement.precision = PrecisionLoss(short_name(judgement.dtype), few.error, lost, samples=few.samples)
    if outcome is not Outcome.EQUIVALENT:
        return outcome
    judgement.method = Method.FEW_SAMPLES
    allowed = few.allowed * math.hypot(*(row.reference for row in rows if math.isfinite(row.reference)))
    judgement.rows = [
        not_compared(row)
        if row.why is not None
        else record(row, Outcome.EQUIVALENT, Method.FEW_SAMPLES, allowed, row.difference)
        for row in rows
    ]
    return outcome


def _divergence_shows(task: Task, rows: list[Difference], unit: float) -> bool:
    """Whether a diagnosis is to be expected: it costs an equivalent verdict time to be listened to."""
    finite = [(row.difference, row.reference) for row in rows if math.isfinite(row.difference)]
    return task.strategy == "accumulate" and task.steps > 1 and relative_total(finite) > SHOWS_UNITS * unit


def _decide_in_working_precision(task: Task, judgement: Judgement, unit: float) -> bool:
    """Whether working precision decides every parameter, or the few that it leaves open are settled by a part."""
    open_ones = [
        row for row in judgement.rows if row.outcome is Outcome.INCONCLUSIVE and row.method != Method.NOT_COMPARED
    ]
    if not open_ones or unit <= U64:
        return not open_ones
    open_rows = [judgement.working[row.name] for row in open_ones]
    passes = judgement.full, judgement.accumulated
    rows = judgement.working.values()
    decided_rows = decide_open_rows(task, judgement.state, judgement.record, passes, rows, open_rows, unit)
    if decided_rows is None:
        return False
    decided = {row.name: row for row in decided_rows}
    judgement.rows = [decided.get(row.name, row) for row in judgement.rows]
    judgement.method = Method.TWO_SAMPLES
    return True
