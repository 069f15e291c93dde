"""Decides a few open parameters without a float64 control of the whole batch: by two cheap runs on a part of it.

    noise floor   the first micro-batch alone, against itself with each weight rounded otherwise: 2/K of a pass
    float64       two samples at once against the same two one by one: a fault of structure shows in any two samples

Only both together settle anything, and only where a fault of more than 1e-5 of the gradient would have been seen by the
floor alone. What they do not settle goes to the float64 control of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from gaverify.passes.gradients import PassResult, accumulated_gradients
from gaverify.passes.isolation import ModelState, generator_states
from gaverify.passes.perturbation import moved, rounding_share
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task
from gaverify.records.comparison import Method, Outcome, ParameterComparison
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import measure
from gaverify.verdict.control import in_float64
from gaverify.verdict.criteria import U64, Difference, Grounds, decide, fine, zero_in_float64

_SAME = 1e-7  # relative difference of weights that are the same number


def micro_batch_floor(
    task: Task,
    state: ModelState,
    record: DrawRecord,
    full: PassResult,
    weight: float,
    names: Collection[str],
    unit: float,
) -> dict[str, float]:
    """Returns for the parameters `names` how far rounding moves the accumulated gradient, told by one micro-batch.

        √K · ‖w₁ g₁(θ) − w₁ g₁(θ')‖₂        θ' with each weight moved by its roundoff

    The roundings of K micro-batches are independent, so their norms add in squares.
    """
    alone = replace(task, sizes=task.sizes[:1], weighting=[weight])
    parameters = list(task.parameters.values())
    restore = generator_states()

    def gradients(state: ModelState) -> PassResult:
        found = accumulated_gradients(alone, state, record, full)
        found.gradients = {name: found.gradients[name] for name in names}
        return found

    task.progress("noise floor of one micro-batch")
    here = gradients(state)
    with moved(parameters, [rounding_share(parameter, unit) for parameter in parameters]):
        there = gradients(ModelState(task.modules, (task.problem.loss,)))
    restore()
    rows = measure(there.gradients, here.gradients)
    return {row.name: math.sqrt(task.steps) * row.difference for row in rows if math.isfinite(row.difference)}


def two_samples_agree(task: Task, state: ModelState, record: DrawRecord, full: PassResult, share: float) -> bool:
    """Whether the first two samples at once and one by one have the same gradient in float64.

    Args:
        task: What to run, of two samples at least.
        state: Restored in the end.
        record: The full batch's draws.
        full: The full-batch pass.
        share: The weight of a sample: 1/2 of a mean, 1 of a sum.

    Raises:
        Exception: Whatever a kernel without float64, or a model that takes no single sample, raises.
    """
    with in_float64(task, state) as (lifted, there):
        task.progress("float64: two samples")
        at_once = replace(lifted, sizes=(2,), weighting=[1.0])
        whole = accumulated_gradients(at_once, there, record, full, lift=True)
        one_by_one = replace(lifted, sizes=(1, 1), weighting=[share, share])
        parts = accumulated_gradients(one_by_one, there, record, whole, lift=True)
        rows = measure(parts.gradients, whole.gradients)
    decided = [decide(row, Grounds(Method.FLOAT64_CONTROL, U64)) for row in rows]
    zero = zero_in_float64(decided)
    return all(
        row.outcome is Outcome.EQUIVALENT or max(row.reference_norm, row.accumulated_norm) <= zero for row in decided
    )


def settled(
    task: Task,
    state: ModelState,
    record: DrawRecord,
    passes: tuple[PassResult, PassResult],
    open_rows: Sequence[Difference],
    unit: float,
) -> list[ParameterComparison] | None:
    """Returns the records of rows that working precision left open, all equivalent; None where they are not settled.

    Args:
        task: What was run.
        state: Of the model before the passes.
        record: The draws.
        passes: The full batch's and the accumulated one, without their gradients.
        open_rows: What is left to decide.
        unit: Unit roundoff of the working precision.
    """
    full, accumulated = passes
    share = _share(task, accumulated.weights)
    if share is None or record.inner or record.ambiguous or record.unaligned or not all(map(fine, open_rows)):
        return None
    dealt = replace(record, used=set(), made={})  # what these runs do with the draws is nothing to report
    try:
        names = [row.name for row in open_rows]
        floor = micro_batch_floor(task, state, dealt, full, accumulated.weights[0], names, unit)
        rows = [decide(row, Grounds(Method.MICRO_BATCH_FLOOR, unit, floor=floor.get(row.name))) for row in open_rows]
        if any(row.outcome is not Outcome.EQUIVALENT for row in rows):
            return None
        agree = two_samples_agree(task, state, dealt, full, share) and not (dealt.unaligned or dealt.ambiguous)
        return rows if agree else None
    except Exception as error:  # single samples that the model does not take, a kernel without float64
        if is_own_fault(error):
            raise
        return None


def _share(task: Task, weights: Sequence[float]) -> float | None:
    """The weight that a sample would have among two; None where the micro-batches' weights do not tell.

    A weight that is a little wrong is seen where all micro-batches are run, and nowhere else.
    """
    if task.steps < 2 or task.batch_size < 2 or len(weights) != task.steps:
        return None
    if all(math.isclose(w, n / task.batch_size, rel_tol=_SAME) for w, n in zip(weights, task.sizes, strict=True)):
        return 0.5
    return 1.0 if all(weight == 1.0 for weight in weights) else None
