"""How the ranks hold the model, as the user's code wrapped it or under the engine asked for, and train their window.

Shapes: R ranks, K micro-batches each, of the batch's K · R. Where every rank has the whole batch, rank r runs the
micro-batches r, R + r, 2R + r, …, so that the k-th ones of all ranks lie side by side. Where the batches of the ranks
were put together, it runs its own: those from r · K on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gaverify.collective.engines import PlainModel, Synchronised, WithoutEngine, loss_factor
from gaverify.collective.membership import NAMESPACES, Member, TrafficMeter
from gaverify.errors import ProblemError
from gaverify.passes.calls import OperationMode
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import (
    Gradients,
    PassProbe,
    PassResult,
)
from gaverify.passes.layouts import digest_of
from gaverify.passes.wrappers import (
    dividing,
    engine_of,
    is_flattened,
    is_sharded,
    tensor_parallel,
)
from gaverify.records.ranks import Engine
from gaverify.torch_internals import SYNC_BATCH_NORM_MODULE, gather
from gaverify.tracebacks import Owner, display_path, owner_of

_ENGINES = ("torch.distributed.fsdp", "torch.nn.parallel", SYNC_BATCH_NORM_MODULE, "torch.distributed.tensor")
"""What calls collectives for the user, `SyncBatchNorm` among it."""


def users_engine(modules: list[nn.Module]) -> Engine | None:
    """Returns the engine that the user's code put the modules under; None where it used none.

    Raises:
        ProblemError: Another one did.
    """
    if is_flattened(modules):
        raise ProblemError(
            "the model is under FullyShardedDataParallel (FSDP1), whose flat parameters cannot be compared shard "
            "by shard; use `fully_shard` (FSDP2), or give the plain model"
        )
    if tensor_parallel(modules, [parameter for root in modules for parameter in root.parameters()]):
        raise ProblemError(
            "layers of the model are split over ranks (tensor parallelism), which gaverify cannot compare yet; "
            "verify the model without it"
        )
    return engine_of(modules)


def bare(experiment: Experiment) -> Experiment:
    """Returns the experiment with the model inside DistributedDataParallel, which computes without other ranks."""
    inner = getattr(experiment.problem.model, "module", experiment.problem.model)
    loss = experiment.problem.loss
    if isinstance(loss, nn.parallel.DistributedDataParallel):
        loss = loss.module
    return replace(experiment, problem=replace(experiment.problem, model=inner, loss=loss))


def description(experiment: Experiment) -> str:
    """Returns a digest of what every rank has to have alike: the parameters, and the values of those it holds whole."""
    words = [
        (name, f"{tuple(parameter.shape)} {parameter.dtype}" if is_sharded(parameter) else parameter)
        for name, parameter in experiment.parameters.items()
    ]
    return digest_of(iter(words))


@dataclass(frozen=True)
class Trained:
    """How the ranks train, and under which engine.

    In controls `shares` multiply this rank's losses in turn, the last all that follow.
    `factors` are what the user's code lets FSDP2 divide by: part of what is tested, so that nothing else knows them.
    `plain` is the model before gaverify put it under the engine; None where the user's code did.
    `shared_batch`: every rank was given the whole batch.
    `without_engine` is what the micro-batches of such a model showed before that.
    """

    member: Member
    engine: Engine
    shares: tuple[float, ...] = (1.0,)
    factors: tuple[float | None, ...] = ()
    plain: PlainModel | None = None
    shared_batch: bool = False
    without_engine: WithoutEngine | None = None

    @contextmanager
    def reference(self, experiment: Experiment) -> Iterator[Experiment]:
        """Gives the experiment that runs the whole batch on every rank: without DDP, which is part of what is tested.

        Without any engine, and in a group of one rank, where gaverify put the model under it.
        """
        if self.plain is not None:
            with self.plain.alone(experiment) as single:
                yield single
        else:
            yield bare(experiment) if self.engine is Engine.DDP else experiment

    def in_float64(self, experiment: Experiment) -> AbstractContextManager[Experiment]:
        """Gives the experiment in float64."""
        return experiment.in_float64() if self.plain is None else self.plain.in_float64(experiment)

    def place(self, gradients: Gradients) -> Gradients:
        """Returns gradients of the reference as the ranks hold theirs: whole, or their shards."""
        return gradients if self.plain is None else self.plain.place(gradients)

    def gather(self, gradients: Gradients) -> Gradients:
        """Returns gradients that the ranks hold in shards as the reference has them. Every rank has to call it."""
        if self.plain is None:
            return gradients
        return {name: gather(gradient) if is_sharded(gradient) else gradient for name, gradient in gradients.items()}

    def has_own_hooks(self, experiment: Experiment) -> bool:
        """Whether the user's code put hooks of its own in the place of DDP's mean over the ranks."""
        return any(getattr(module, "_comm_hooks", None) for root in experiment.modules for module in root.modules())

    def own(self, experiment: Experiment, rank: int | None = None) -> range:
        """The micro-batches of a rank, by default of this one."""
        number = self.member.rank if rank is None else rank
        if self.shared_batch:
            return range(number, experiment.steps, self.member.count)
        steps = experiment.steps // self.member.count
        return range(number * steps, (number + 1) * steps)

    def window(self, experiment: Experiment, full: PassResult) -> tuple[PassResult, TrafficMeter]:
        """Returns the gradient that the ranks end up with, and what counted the window's collectives."""
        meter, rank_range = TrafficMeter(), self.own(experiment)
        factor = loss_factor(experiment, self.member.count)
        probe = Synchronised(experiment, self.engine, rank_range[-1], factor, self.shares)
        with meter.counting(), dividing(experiment.modules, self.factors):
            result = experiment.micro_batches(full, probe, own=rank_range)
        self.member.window_ended()
        if any(getattr(module, "gradient_as_bucket_view", False) for module in experiment.modules):
            # views into DDP's buckets, which the next pass writes to
            result.gradients = {name: None if g is None else g.clone() for name, g in result.gradients.items()}
        return result, meter


class OwnCollectives(PassProbe):
    """Notes the first collective that the model's or the loss's own code calls in a forward; no engine's or layer's."""

    def __init__(self) -> None:
        self.found = ""
        self._forward = True

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Listens to one forward."""
        with OperationMode(self._ran):
            yield

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Stops listening before the engine's own reductions."""
        self._forward = False
        super().backward(k, loss, weight)

    def _ran(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._forward and not self.found and func.namespace in NAMESPACES:
            self.found = _caller()
        return func(*args, **kwargs)


def _caller() -> str:
    """Where the user's code called the collective that runs right now; "" where an engine or a layer of torch's did."""
    frame: Any = sys._getframe(1)
    while frame is not None and owner_of(frame.f_code.co_filename) is Owner.MACHINERY:
        if frame.f_globals.get("__name__", "").startswith(_ENGINES):
            return ""
        frame = frame.f_back
    return f"{display_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""
