"""A window that the user's own function runs: its micro-batches, as many backward passes as it likes, no step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from gaverify.errors import ProblemError
from gaverify.passes.batching import fresh
from gaverify.passes.dispatch import PassMode
from gaverify.passes.gradients import PassResult, collected, one_pass
from gaverify.passes.isolation import ModelState
from gaverify.passes.randomness import DrawRecord, Recorder
from gaverify.passes.shards import local
from gaverify.passes.task import Task, micro_batch_of, told_as_users
from gaverify.tracebacks import hands_over

Strategy = Callable[[Any, list[Any]], None]


@hands_over
def gradients_of_strategy(
    task: Task, state: ModelState, record: DrawRecord, strategy: Strategy, own: Collection[int]
) -> PassResult:
    """Returns what `strategy(model, micro_batches)` leaves in `.grad`.

    Args:
        task: What to run.
        state: Restored in the end.
        record: The full batch's draws.
        strategy: The user's function.
        own: The micro-batches that it is given.

    Raises:
        ProblemError: It raised, changed a parameter, or the model draws random numbers, which cannot be dealt out to
            micro-batches that nobody sees.
    """
    if record.count:
        raise ProblemError(
            "the model draws random numbers, and a strategy of your own does not say for which micro-batch; "
            "verify it with mode='eval', or switch its dropout off"
        )
    parts = []
    for k, (start, stop) in enumerate(task.bounds()):
        if k in own:
            parts.append(fresh(micro_batch_of(task, start, stop, f"micro-batch {k + 1} of {task.steps}")))
    mode = PassMode(state, Recorder())
    with one_pass(task, state):
        before = _versions(task)
        with mode, told_as_users("the strategy", task), task.autocasting():
            strategy(task.problem.model, parts)
        if _versions(task) != before:
            raise ProblemError(
                "the strategy changes parameters, as an optimizer's step does; "
                "let it end with the gradients in `.grad`, which are what is compared"
            )
        gradients = collected(task)
    return PassResult(gradients, float("nan"), observed=(mode.observed,))


def _versions(task: Task) -> list[int]:
    with torch.no_grad():
        return [local(parameter)._version for parameter in task.parameters.values()]
