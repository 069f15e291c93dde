"""Decides a few open parameters without a float64 control of the whole batch: by two of its samples.

    float64             both samples at once against one by one: a fault of structure shows in any two samples
    working precision   both at once, against float64: their rounding, measured

Only both together settle anything, and only differences below 1e-5 of the gradient, or of a gradient that is zero there
(what shifts the logits of a softmax: the bias of attention's keys). What they do not settle goes to the float64 control
of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from gaverify.errors import ProblemError
from gaverify.passes.gradients import Gradients, PassProbe, PassResult, accumulated_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task
from gaverify.passes.weighting import valid_targets
from gaverify.records.comparison import Method, Outcome, ParameterComparison
from gaverify.thresholds import SAME_NUMBER, U64
from gaverify.tracebacks import hands_over, is_own_fault
from gaverify.verdict.comparison import measure
from gaverify.verdict.control import in_float64
from gaverify.verdict.criteria import Difference, Grounds, decide, fine, zero_in_float64


class _Only(PassProbe):
    """Forms the gradients of some parameters alone: those of the other weights are up to a third of a pass."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts these gradients of `weight` · `loss` into `.grad`."""
        (loss * weight if weight != 1.0 else loss).backward(inputs=self._parameters)  # type: ignore[no-untyped-call]


class Rounding(NamedTuple):
    """How far working precision rounds a gradient, and whether float64 leaves nothing of that."""

    size: float
    zero: bool


def rounding_of_two_samples(
    task: Task,
    state: ModelState,
    record: DrawRecord,
    full: PassResult,
    names: Sequence[str],
    share: float,
    zero: float,
) -> dict[str, Rounding] | None:
    """Returns how far working precision rounds the gradient of the first two samples, for the parameters `names`.

    None where these samples at once and one by one have not the same gradient in float64.

    Args:
        task: What to run, of two samples at least.
        state: Restored in the end.
        record: The full batch's draws.
        full: The full-batch pass.
        names: The parameters whose gradients are looked at.
        share: The weight of a sample: 1/2 of a mean, 1 of a sum.
        zero: The norm up to which a gradient may be float64's rounding.

    Raises:
        Exception: Whatever a kernel without float64, or a model that takes no single sample, raises.
    """
    only: PassProbe | None = _Only([task.parameters[name] for name in names])

    def gradients(task: Task, state: ModelState, count: int, weight: float, *, lift: bool) -> Gradients:
        part = replace(task, sizes=(2 // count,) * count, weighting=[weight] * count)
        found = accumulated_gradients(part, state, record, full, lift=lift, probe=only).gradients
        return {name: found[name] for name in names}

    task.progress("two samples")
    rounded: Gradients = {}
    with suppress(ProblemError):
        rounded = gradients(task, state, 1, 1.0, lift=False)
    # reentrant activation checkpointing forms all gradients or none
    if not rounded or any(gradient is None for gradient in rounded.values()):
        only = None
        rounded = gradients(task, state, 1, 1.0, lift=False)
    with in_float64(task, state) as (lifted, there):
        task.progress("float64: two samples")
        at_once = gradients(lifted, there, 1, 1.0, lift=True)
        rows = measure(gradients(lifted, there, 2, share, lift=True), at_once)
        if not _agree(rows, zero):
            return None
        here = {name: g if g is None else g.to(task.parameters[name].device) for name, g in rounded.items()}
        found = measure(here, at_once)
        return {row.name: Rounding(row.difference, row.reference <= zero) for row in found if row.why is None}


def _agree(rows: Sequence[Difference], zero: float) -> bool:
    """Whether all rows that were measured in float64 are rounding."""
    grounds = Grounds(Method.FLOAT64_CONTROL, U64)
    return all(decide(row, grounds).outcome is Outcome.EQUIVALENT or row.scale <= zero for row in rows)


def settled(
    task: Task,
    state: ModelState,
    record: DrawRecord,
    passes: tuple[PassResult, PassResult],
    rows: Iterable[Difference],
    open_rows: Sequence[Difference],
    unit: float,
) -> list[ParameterComparison] | None:
    """Returns the records of rows that working precision left open, all equivalent; None where they are not settled.

    What rounds a mean over two samples by so much rounds that over B by no more: a sum that is formed term by term
    rounds in proportion to its terms at most, and independent roundings add in squares. A sum over B has B/2 times it.

    Args:
        task: What was run.
        state: Of the model before the passes.
        record: The draws.
        passes: The full batch's and the accumulated one, without their gradients.
        rows: All parameters'.
        open_rows: What is left to decide.
        unit: Unit roundoff of the working precision.
    """
    full, accumulated = passes
    share, norms = _share(task, accumulated), [row.reference for row in rows]
    small = math.sqrt(unit) * max(filter(math.isfinite, norms), default=0.0)  # what may be rounding of nothing
    if share is None or record.inner or record.ambiguous or record.unaligned:
        return None
    if not all(fine(row) or row.scale <= small for row in open_rows):
        return None
    dealt = replace(record, used=set(), made={})  # what these runs do with the draws is nothing to report
    try:
        names, zero = [row.name for row in open_rows], zero_in_float64(norms)
        rounding = rounding_of_two_samples(task, state, dealt, full, names, share, zero)
    except Exception as error:  # single samples that the model does not take, a kernel without float64
        if is_own_fault(error):
            raise
        return None
    if rounding is None or dealt.unaligned or dealt.ambiguous:
        return None
    times = 1.0 if share < 1.0 else task.batch_size / 2
    known = [rounding.get(row.name, Rounding(0.0, zero=False)) for row in open_rows]
    grounds = [Grounds(Method.TWO_SAMPLES, unit, floor=times * each.size, zero=each.zero) for each in known]
    decided = [decide(row, known) for row, known in zip(open_rows, grounds, strict=True)]
    return decided if all(row.outcome is Outcome.EQUIVALENT for row in decided) else None


def _share(task: Task, accumulated: PassResult) -> float | None:
    """The weight that a sample would have among two; None where the micro-batches' weights or targets do not tell.

    A weight that is a little wrong, and a target more or less, are seen where all micro-batches are run.
    """
    weights = accumulated.weights
    if task.steps < 2 or task.batch_size < 2 or len(weights) != task.steps:
        return None
    targets = [valid_targets(observed) for observed in accumulated.observed]
    if len({None if count is None else count / n for count, n in zip(targets, task.sizes, strict=True)}) > 1:
        return None
    if all(math.isclose(w, n / task.batch_size, rel_tol=SAME_NUMBER) for w, n in zip(weights, task.sizes, strict=True)):
        return 1 / 2
    return 1.0 if all(weight == 1.0 for weight in weights) else None
