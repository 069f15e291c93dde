"""Puts a model under DDP or FSDP2, as a user would: torch's own wrappers and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gaverify.errors import ProblemError
from gaverify.passes.gradients import PassProbe
from gaverify.passes.task import Task
from gaverify.records.ranks import Engine


def wrapped(task: Task, engine: Engine, unused: bool) -> Task:
    """Returns the task with its model under the engine; the process group has to be there.

    Args:
        task: With the bare model.
        engine: DDP or FSDP2.
        unused: Whether some parameters take no part in the loss; DDP waits for them for ever if it is not told.

    Raises:
        ProblemError: The engine refuses the model.
    """
    try:
        if engine is Engine.DDP:
            model: nn.Module = nn.parallel.DistributedDataParallel(task.problem.model, find_unused_parameters=unused)
            return replace(task, problem=replace(task.problem, model=model))
        return _sharded(task)
    except Exception as error:
        raise ProblemError(f"{engine.value} refuses the model: {type(error).__name__}: {error}") from error


def _sharded(task: Task) -> Task:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch 2.4 and 2.5
        from torch.distributed._composable.fsdp import fully_shard  # type: ignore

    model = task.problem.model
    for block in _blocks(model):
        fully_shard(block)
    fully_shard(model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = list(task.parameters)
    if set(parameters) != set(names):
        raise ProblemError("parameters of a loss module are not sharded; put them into the model, or use engine ddp")
    return replace(task, parameters={name: parameters[name] for name in names})


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks of the model's lists and sequences, as a user shards them; none where blocks share parameters.

    FSDP2 gathers a group of parameters when its module runs, so a parameter that two groups share has no owner.
    """
    seen: set[int] = set()
    for parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter[1]) in seen:
            return
        seen.add(id(parameter[1]))
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from (child for child in module if any(True for _ in child.parameters()))


class Scaled(PassProbe):
    """A rank's own gradients, scaled as its loop scales them: the engines average over the ranks.

    Args:
        ranks: R; each micro-batch's loss counts R times its weight.
        share: What the loss is multiplied by besides, in a control.
    """

    def __init__(self, ranks: int, share: float = 1.0) -> None:
        self._ranks = ranks * share

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts the gradients of R · `weight` · `loss` into `.grad`."""
        super().backward(k, loss, weight * self._ranks)


class Synchronised(Scaled):
    """Reduces the gradients with a rank's last micro-batch only, as `no_sync` is meant to be used.

    Args:
        task: Under its engine.
        engine: Which it is.
        last: The rank's last micro-batch.
        ranks: R.
        share: What the loss is multiplied by besides, in a control.
    """

    def __init__(self, task: Task, engine: Engine, last: int, ranks: int, share: float = 1.0) -> None:
        super().__init__(ranks, share)
        self._model: Any = task.problem.model
        self._engine, self._last = engine, last

    def around(self, k: int | None) -> AbstractContextManager[Any]:
        """Leaves the reduction out of all micro-batches but the last."""
        if self._engine is Engine.DDP:
            return contextlib.nullcontext() if k == self._last else self._model.no_sync()  # type: ignore[no-any-return]
        self._model.set_requires_gradient_sync(k == self._last)
        self._model.set_is_last_backward(k == self._last)
        return contextlib.nullcontext()
