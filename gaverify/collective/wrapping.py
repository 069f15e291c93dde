"""How the ranks hold the model: as the user's code wrapped it, or, where that did not, under the engine asked for."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from gaverify.errors import ProblemError
from gaverify.passes.fingerprints import digest_of
from gaverify.passes.shards import is_sharded
from gaverify.passes.task import Task
from gaverify.passes.wrappers import engine_of, flattened, tensor_parallel
from gaverify.ranks.engines import Reach, blocks, wrapped
from gaverify.records.ranks import Engine


def users_engine(modules: list[nn.Module]) -> Engine | None:
    """Returns the engine that the user's code put the modules under; None where it used none.

    Raises:
        ProblemError: Another one did.
    """
    if flattened(modules):
        raise ProblemError(
            "the model is under FullyShardedDataParallel (FSDP1), whose flat parameters are not compared shard by "
            "shard; use `fully_shard` (FSDP2), or give the plain model"
        )
    if tensor_parallel(modules, [parameter for root in modules for parameter in root.parameters()]):
        raise ProblemError(
            "layers of the model are split over ranks (tensor parallelism), which are not compared yet; "
            "verify the model without it"
        )
    return engine_of(modules)


def under(task: Task, engine: Engine) -> Task:
    """Returns the task with a plain model under an engine; only the whole of it is sharded.

    What a micro-batch leaves out is not known yet: DDP is told to expect it.
    """
    model = task.problem.model
    return wrapped(task, engine, Reach(True, ((0,),) * len(list(blocks(model)))))


def bare(task: Task) -> Task:
    """Returns the task with the model inside DistributedDataParallel, which computes without other ranks."""
    inner = getattr(task.problem.model, "module", task.problem.model)
    loss = task.problem.loss
    if isinstance(loss, nn.parallel.DistributedDataParallel):
        loss = loss.module
    return replace(task, problem=replace(task.problem, model=inner, loss=loss))


def description(task: Task) -> str:
    """Returns a digest of what every rank has to have alike: the parameters, and the values of those it holds whole."""
    words = [
        (name, f"{tuple(parameter.shape)} {parameter.dtype}" if is_sharded(parameter) else parameter)
        for name, parameter in task.parameters.items()
    ]
    return digest_of(iter(words))
