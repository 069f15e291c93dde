"""Decides every parameter: working precision first, then the float64 control, then the noise floor."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from gaverify.comparison import WORKING_UNITS, Difference, judged, measure
from gaverify.control import (
    U64,
    VANISHING,
    Control,
    control_floor,
    failure_sentence,
    float64_control,
    judge_by_control,
    judge_by_floor,
    noise_floor,
    vanishing,
)
from gaverify.errors import ProblemError
from gaverify.gradients import Gradients, PassResult, Task, accumulated_gradients, full_batch_gradients
from gaverify.isolation import ModelState
from gaverify.measurements import BITS_WORTH_A_NOTE, PrecisionLoss
from gaverify.precision import short_name, unit_roundoff
from gaverify.randomness import DrawRecord
from gaverify.results import Finding, Method, Outcome, ParameterComparison


@dataclass
class Judgement:
    """What was decided, by which method, and the passes that it rests on."""

    rows: list[ParameterComparison]
    method: Method
    full: PassResult
    accumulated: PassResult
    record: DrawRecord
    state: ModelState
    dtype: torch.dtype
    working: dict[str, Difference]
    scales: dict[str, float]
    control: Control | None = None
    control_failure: str = ""
    precision: PrecisionLoss | None = None
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def resolution(self) -> float:
        """The smallest relative difference that the deciding method could have seen in its least clear parameter."""
        rows = [row for row in self.rows if math.isfinite(row.relative_allowed) and row.relative_allowed > 0]
        most = max((row.reference_norm for row in rows), default=0.0)
        # a gradient that is zero but for rounding has no relative difference to speak of
        return max((row.relative_allowed for row in rows if row.reference_norm > VANISHING * most), default=0.0)

    def outcome(self, findings: tuple[Finding, ...]) -> Outcome:
        """The verdict of all parameters together."""
        outcomes = {row.outcome for row in self.rows}
        if Outcome.DIVERGENT in outcomes or any(finding.severity == "fault" for finding in findings):
            return Outcome.DIVERGENT
        compared = [row for row in self.rows if math.isfinite(row.difference_norm)]
        if Outcome.INCONCLUSIVE in outcomes or not compared or not self.informative:
            return Outcome.INCONCLUSIVE
        return Outcome.EQUIVALENT

    @property
    def informative(self) -> bool:
        """Whether there was any gradient to tell by."""
        return any(row.reference_norm > 0 or row.accumulated_norm > 0 for row in self.rows)


def judge(task: Task, *, rtol: float | None, atol: float | None, keep_gradients: bool = False) -> Judgement:
    """Runs both strategies and decides every parameter.

    Raises:
        ProblemError: The loss of the full batch is not finite, or the user's code raised.
    """
    started = time.perf_counter()
    state = ModelState(task.modules, (task.problem.loss,))
    task.progress("the full batch")
    task, full, record = _recorded(task, state)
    full_at = time.perf_counter()
    if not math.isfinite(full.loss):
        raise ProblemError(
            f"the loss of the full batch is {full.loss}; a gradient of it proves nothing: "
            "check the inputs, the targets (are all ignored?) and the learning state"
        )
    accumulated = accumulated_gradients(task, state, record, full)
    accumulated_at = time.perf_counter()
    measured = measure(accumulated.gradients, full.gradients)
    if record.ambiguous and not _agree(task, measured):
        accumulated, measured = _other_reading(task, state, record, full, accumulated, measured)
    if rtol is not None and atol is not None:
        rows = _by_tolerance(measured, accumulated.gradients, full.gradients, rtol, atol)
    judgement = Judgement(
        [], "working-precision", full, accumulated, record, state, _dtype(task),
        {row.name: row for row in measured}, {name: float(scale) for name, scale in full.term_scales.items()},
    )  # fmt: skip
    low = unit_roundoff(judgement.dtype) > unit_roundoff(torch.float32) and rtol is None
    kept = (dict(full.gradients), dict(accumulated.gradients)) if low else None
    if not keep_gradients:
        _drop(full)
        _drop(accumulated)
    judgement.timings = {
        "full_batch": full_at - started,
        "accumulated": accumulated_at - full_at,
        "comparison": time.perf_counter() - accumulated_at,
    }
    if rtol is not None:
        judgement.rows, judgement.method = rows, "tolerance"
        return judgement
    _decide(task, judgement)
    if kept is not None and judgement.control is not None:
        judgement.precision = _precision_loss(task, judgement, *kept)
    judgement.timings["control"] = time.perf_counter() - accumulated_at - judgement.timings["comparison"]
    return judgement


def _recorded(task: Task, state: ModelState) -> tuple[Task, PassResult, DrawRecord]:
    """The full-batch pass; once more on unfused kernels where draws were made inside a fused one."""
    full, record = full_batch_gradients(task, state)
    if record.fused and not task.math_kernels:
        task.math_kernels = True
        full, record = full_batch_gradients(task, state)
    return task, full, record


def _agree(task: Task, measured: list[Difference]) -> bool:
    """Whether all gradients are equal within float32's rounding at least: then no draw went to the wrong sample."""
    unit = max(unit_roundoff(_dtype(task)), unit_roundoff(task.autocast) if task.autocast is not None else 0.0)
    if unit > unit_roundoff(torch.float32):
        return False
    return all(_at_once(row, unit, {}).outcome is Outcome.EQUIVALENT for row in measured)


def _other_reading(
    task: Task, state: ModelState, record: DrawRecord, full: PassResult, accumulated: PassResult,
    measured: list[Difference],
) -> tuple[PassResult, list[Difference]]:  # fmt: skip
    """Deals the draws out in the second reading (`randomness`), and keeps it where it brings the gradients closer.

    Only the right reading can make the gradients of an equivalent model agree.
    """

    def total(rows: list[Difference]) -> float:
        return sum(row.difference for row in rows if math.isfinite(row.difference))

    unaligned = dict(record.unaligned)
    record.inner = True
    try:
        other = accumulated_gradients(task, state, record, full)
    except ProblemError:  # numbers that were not meant for these samples: indices out of range, for example
        other = None
    rows = measure(other.gradients, full.gradients) if other is not None else measured
    if other is not None and total(rows) < total(measured):
        return other, rows
    record.inner, record.unaligned = False, unaligned
    return accumulated, measured


def _precision_loss(task: Task, judgement: Judgement, full: Gradients, accumulated: Gradients) -> PrecisionLoss | None:
    """Holds both working-precision gradients against the float64 one; where bits are lost, float32 sums as well."""
    assert judgement.control is not None
    exact = judgement.control.full.gradients
    loss = PrecisionLoss(short_name(judgement.dtype), _error(full, exact), _error(accumulated, exact))
    if loss.bits_lost < BITS_WORTH_A_NOTE or task.strategy != "accumulate":
        return loss
    return replace(loss, in_float32=_error(_summed_in_float32(task, judgement), exact))


def _error(gradients: Gradients, exact: Gradients) -> float:
    """‖g − exact‖ / ‖exact‖ over all parameters."""
    rows = [row for row in measure(gradients, exact) if math.isfinite(row.difference)]
    scale = math.sqrt(sum(row.reference**2 for row in rows))
    return math.sqrt(sum(row.difference**2 for row in rows)) / scale if scale > 0 else 0.0


def _summed_in_float32(task: Task, judgement: Judgement) -> Gradients:
    """Accumulates once more, each micro-batch's gradient added to a float32 sum: the remedy for lost bits."""
    sums: Gradients = dict.fromkeys(task.parameters)

    def add(_: int) -> None:
        for name, parameter in task.parameters.items():
            if parameter.grad is not None:
                so_far = sums[name]
                part = parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32))
                sums[name] = part if so_far is None else so_far + part
                parameter.grad = None

    accumulated_gradients(task, judgement.state, judgement.record, judgement.full, after_backward=add)
    return sums


def _drop(result: PassResult) -> None:
    """Frees the gradients once they are measured, before a control needs the memory."""
    result.gradients = dict.fromkeys(result.gradients)


def _dtype(task: Task) -> torch.dtype:
    """The lowest precision among the trainable parameters and autocast."""
    dtypes = {parameter.dtype.to_real() for parameter in task.parameters.values()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _decide(task: Task, judgement: Judgement) -> None:
    unit = unit_roundoff(judgement.dtype)
    if task.autocast is not None:
        unit = max(unit, unit_roundoff(task.autocast))
    rows = list(judgement.working.values())
    at_once = [_at_once(row, unit, judgement.scales) for row in rows]
    low = unit > unit_roundoff(torch.float32)
    open_rows = [row for row in at_once if row.outcome is Outcome.INCONCLUSIVE and row.method != "not-compared"]
    judgement.rows = at_once
    if not open_rows and not low:
        return
    if unit > U64:
        try:
            judgement.control = float64_control(task, judgement.state, judgement.record)
        except Exception as error:
            judgement.control_failure = failure_sentence(error)
        else:
            control, scales = judgement.control, judgement.scales
            judgement.rows = judge_by_control(judgement.working, control, scales, unit)
            if vanishing(judgement.rows):
                floor = control_floor(task, judgement.state, judgement.record, control)
                judgement.rows = judge_by_control(judgement.working, control, scales, unit, floor)
            judgement.method = "float64-control"
            return
    full = full_batch_gradients(task, judgement.state, judgement.record)[0]
    floor = noise_floor(task, judgement.state, judgement.record, full, unit)
    judgement.rows = judge_by_floor(judgement.working, floor, judgement.scales, unit)
    judgement.method = "noise-floor"


def _at_once(row: Difference, unit: float, scales: Mapping[str, float]) -> ParameterComparison:
    """Equivalent where ‖Δ‖ is within a few u of the scale of its terms; open otherwise."""
    allowed = WORKING_UNITS * unit * max(row.scale, scales.get(row.name, 0.0))
    outcome = Outcome.EQUIVALENT if row.difference <= allowed else Outcome.INCONCLUSIVE
    return judged(row, outcome, "working-precision", allowed)


def _by_tolerance(
    measured: list[Difference], accumulated: Gradients, reference: Gradients, rtol: float, atol: float
) -> list[ParameterComparison]:
    """Decides by |actual − expected| ≤ atol + rtol · |expected| for every element, as `assert_close` does."""
    rows = []
    for row in measured:
        actual, expected = accumulated[row.name], reference[row.name]
        allowed, outcome = math.nan, Outcome.INCONCLUSIVE
        if actual is not None and expected is not None:
            actual, expected = (t.to_dense() if t.layout is not torch.strided else t for t in (actual, expected))
            close = bool(torch.isclose(actual, expected, rtol=rtol, atol=atol).all())
            outcome = Outcome.EQUIVALENT if close else Outcome.DIVERGENT
            limit = atol + rtol * expected.abs().double()
            allowed = float(torch.linalg.vector_norm(limit))
        rows.append(judged(row, outcome, "tolerance", allowed))
    return rows
