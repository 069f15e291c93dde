"""What accumulating in low precision loses: both working-precision gradients against the float64 one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from gaverify.passes.gradients import Gradients, PassResult, accumulated_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.precision import short_name
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task
from gaverify.records.compared import PrecisionLoss
from gaverify.thresholds import BITS_WORTH_A_NOTE
from gaverify.verdict.comparison import left_between


class Measured(NamedTuple):
    """The full-batch pass in working precision, its draws, and the state that it began with."""

    full: PassResult
    record: DrawRecord
    state: ModelState


def precision_loss(
    task: Task, passes: Measured, exact: Gradients, full: Gradients, accumulated: Gradients
) -> PrecisionLoss | None:
    """Holds both gradients against the exact one; where bits are lost, those of float32 sums as well.

    Args:
        task: What is verified.
        passes: What another accumulation needs.
        exact: The full batch's gradients in float64.
        full: The same in working precision.
        accumulated: Those of the micro-batches.

    Returns:
        None where every gradient is zero in float64.
    """
    loss = PrecisionLoss(
        short_name(lowest_precision(task)), left_between(full, exact), left_between(accumulated, exact)
    )
    if not math.isfinite(loss.full + loss.accumulated):
        return None
    if loss.bits_lost < BITS_WORTH_A_NOTE or task.strategy != "accumulate":
        return loss
    return replace(loss, in_float32=left_between(_summed_in_float32(task, passes), exact))


def lowest_precision(task: Task) -> torch.dtype:
    """Returns the least precise dtype among the trainable parameters."""
    dtypes = {parameter.dtype.to_real() for parameter in task.parameters.values()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _summed_in_float32(task: Task, passes: Measured) -> Gradients:
    """Accumulates once more, each micro-batch's gradient added to a float32 sum: the remedy for lost bits."""
    sums: dict[str, torch.Tensor | None] = dict.fromkeys(task.parameters)

    def add(_: int) -> None:
        for name, parameter in task.parameters.items():
            if parameter.grad is not None:
                so_far = sums[name]
                part = parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32))
                sums[name] = part if so_far is None else so_far + part
                parameter.grad = None

    accumulated_gradients(task, passes.state, passes.record, passes.full, after_backward=add)
    return sums
