"""How the ranks hold the model, as the user's code wrapped it or under the engine asked for, and train their window.

Shapes: R ranks, K micro-batches each, of the batch's K · R. Where every rank has the whole batch, rank r runs the
micro-batches r, R + r, 2R + r, …, so that the k-th ones of all ranks lie side by side. Where the batches of the ranks
were put together, it runs its own: those from r · K on.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import nn

from gaverify.collective.engines import PlainModel, Synchronised, WithoutEngine, loss_factor
from gaverify.collective.membership import NAMESPACES, Member, TrafficMeter, is_lost
from gaverify.errors import Agreed, ProblemError
from gaverify.passes.calls import OperationMode
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import (
    AfterBackward,
    Gradients,
    PassProbe,
    PassResult,
)
from gaverify.passes.layouts import digest_of
from gaverify.passes.wrappers import (
    RankSum,
    dividing,
    engine_of,
    is_flattened,
    is_sharded,
    tensor_parallel,
)
from gaverify.records.ranks import Engine
from gaverify.torch_internals import SYNC_BATCH_NORM_MODULE, gather
from gaverify.tracebacks import Owner, display_path, owner_of
from gaverify.verdict.measurement import measure_strategies

_ENGINES = ("torch.distributed.fsdp", "torch.nn.parallel", SYNC_BATCH_NORM_MODULE, "torch.distributed.tensor")
"""Packages that call collectives for the user, `SyncBatchNorm` among them."""


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

    def window(
        self, experiment: Experiment, full: PassResult, *probes: PassProbe, after_backward: AfterBackward | None = None
    ) -> tuple[PassResult, TrafficMeter]:
        """Returns the gradient that the ranks end up with, and what counted the window's collectives."""
        meter, rank_range = TrafficMeter(), self.own(experiment)
        factor = loss_factor(experiment, self.member.count)
        probe = Synchronised(experiment, self.engine, rank_range[-1], factor, self.shares)
        with meter.counting(), dividing(experiment.modules, self.factors):
            result = experiment.micro_batches(full, *probes, probe, after_backward=after_backward, own=rank_range)
        self.member.window_ended()
        if any(getattr(module, "gradient_as_bucket_view", False) for module in experiment.modules):
            # views into DDP's buckets, which the next pass writes to
            result.gradients = {name: None if g is None else g.clone() for name, g in result.gradients.items()}
        return result, meter


_CONTROL_PATIENCE = 10.0
"""Seconds, and twice as long as the control took: other ranks that fail in it, too, fail by then."""


@dataclass(frozen=True, kw_only=True)
class RankedExperiment(Experiment):
    """The batch of all ranks, each of which runs its own micro-batches of it."""

    on_ranks: ClassVar[bool] = True
    trained: Trained
    """How the ranks train."""
    full: PassResult | None = None
    """The full batch, its gradients as the ranks hold theirs; None: it has not run, and a plain model has no engine."""
    meters: list[TrafficMeter] = field(default_factory=list)
    """The meter that counted the collectives of each window."""

    @classmethod
    def of(cls, experiment: Experiment, trained: Trained, full: PassResult | None = None) -> RankedExperiment:
        """Returns an experiment as the ranks run it."""
        ranks = RankSum(trained.member.count, trained.member.total)
        return cls(**{**_fields(experiment), "ranks": ranks}, trained=trained, full=full)

    def by_one_process(self) -> Experiment:
        """Returns the experiment whose passes run on this rank what they run in one process."""
        return Experiment(**_fields(self))

    def record(self, *probes: PassProbe, seed: int | None = None) -> tuple[Experiment, PassResult]:
        """Runs the full batch on every rank, then puts a plain model under its engine.

        Raises:
            ProblemError: The problem cannot be verified by ranks.
        """
        if self.full is not None:
            return self, self.full
        trained = self.trained
        self.progress("the whole batch on every rank")
        if trained.plain is not None:
            recorded, full, without_engine = self._run_without_engine(trained.plain)
            experiment = trained.plain.wrap(recorded, trained.engine, without_engine.reach)
            trained = replace(trained, without_engine=without_engine)
        else:
            listener = OwnCollectives()
            with self.as_reference() as reference:
                recorded, full = reference.record(listener, *probes, seed=seed)
            if listener.found:
                raise ProblemError(
                    f"the model or the loss calls `torch.distributed` itself ({listener.found}). The reference runs "
                    "the full batch on every rank, and this call would combine copies of it. Use `gaverify run "
                    "--ranks` without a launcher"
                )
            experiment = replace(
                self.by_one_process(),
                draws=recorded.draws,
                reading=recorded.reading,
                math_kernels=recorded.math_kernels,
            )
        # The bound of a sum's rounding was seen in parts of the sum, so it is no number of all ranks.
        full = replace(full, gradients=trained.place(full.gradients), terms={})
        # The engine has wrapped the model since the experiment was prepared.
        return RankedExperiment.of(experiment, trained, full).with_current_state(), full

    def _run_without_engine(self, plain: PlainModel) -> tuple[Experiment, PassResult, WithoutEngine]:
        """Runs the full batch and this rank's micro-batches before the model is put under an engine.

        Returns:
            The plain experiment with the draws of the full batch, that pass, and what the micro-batches showed.
        """
        with plain.alone(self) as single:
            recorded, full = single.record()
        without_engine = plain.run_own(recorded, full, self.trained.own(recorded))
        if without_engine.ambiguous_draws:
            # One process tries both readings of the draws on all micro-batches, and keeps the one that fits.
            with plain.alone(self) as single:
                measurement = measure_strategies(single)
            recorded, full = measurement.experiment, measurement.full
            without_engine = plain.run_own(recorded, full, self.trained.own(recorded))
        if without_engine.calls.count() and not self.trained.shared_batch:
            raise ProblemError(
                "the model or the loss calls `torch.distributed` itself, and the ranks have different batches; give "
                "every rank the full batch, and gaverify selects its micro-batches"
            )
        return recorded, full, without_engine

    @contextmanager
    def as_reference(self) -> Iterator[Experiment]:
        """Gives the experiment that runs the whole batch on every rank: without DDP, which is part of what is tested.

        Without any engine, and in a group of one rank, where gaverify put the model under it.
        """
        if self.trained.plain is not None:
            with self.trained.plain.alone(self) as single:
                yield single
        else:
            yield bare(self.by_one_process()) if self.trained.engine is Engine.DDP else self.by_one_process()

    def full_batch(self, *probes: PassProbe) -> PassResult:
        """Runs the full batch on every rank; its gradients are as the ranks hold theirs."""
        with ExitStack() as stack:
            reference = stack.enter_context(self.as_reference())
            if reference.lift is not self.lift:  # a plain model under FSDP2 has weights of its own
                reference = stack.enter_context(reference.in_float64())
            full = reference.full_batch(*probes)
        return replace(full, gradients=self.trained.place(full.gradients), terms={})

    def micro_batches(
        self,
        full: PassResult,
        *probes: PassProbe,
        after_backward: AfterBackward | None = None,
        own: Collection[int] | None = None,
    ) -> PassResult:
        """Runs this rank's micro-batches with the engine's reduction; their loss is that of all ranks."""
        window, meter = self.trained.window(self.by_one_process(), full, *probes, after_backward=after_backward)
        self.meters.append(meter)
        window.loss = float(self.trained.member.total(torch.tensor([window.loss], dtype=torch.float64, device="cpu")))
        return window

    @contextmanager
    def in_float64(self, *, weights: bool = True) -> Iterator[Experiment]:
        """Gives the experiment under the engine in float64, for as long as the block runs."""
        # Call sites are known by the plain model's modules, so that the wrappers are not among the experiment's.
        renew = self.trained.plain.renew_reducers if self.trained.plain is not None else _do_nothing
        try:
            with super().in_float64(weights=weights) as exact:
                renew()
                yield exact
        finally:
            renew()

    def coarsest(self, unit: float) -> float:
        """Returns the coarsest unit roundoff of all ranks, each of which has seen its own micro-batches alone."""
        return float(max(self.trained.member.everyones("unit", unit)))

    def agree_on_control(self, failure: str, error: Exception | None, seconds: float) -> str:
        """Returns why the first rank that could not run a control could not.

        Where one could not alone, such as for its memory, the others wait for it in a collective that no word ends.
        """
        if isinstance(error, Agreed) or (error is not None and is_lost(error)):
            raise error
        within = 2 * seconds + _CONTROL_PATIENCE if failure else None
        own_failure = f"the float64 control failed on this rank alone: {failure}" if failure else ""
        failures = self.trained.member.everyones("control", failure, within, own_failure)
        return next(filter(None, failures), "")


def _fields(experiment: Experiment) -> dict[str, Any]:
    return {each.name: getattr(experiment, each.name) for each in fields(Experiment)}


def _do_nothing() -> None:
    """Stands for the renewal of reducers where the user's code made them: the conversion of weights renews those."""


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
