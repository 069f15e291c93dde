"""Puts a model under DDP or FSDP2 as a user would, and runs it as it was before, without other ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from gaverify.children.folders import working_folder
from gaverify.collective.membership import Member, TrafficMeter
from gaverify.errors import ProblemError
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, PassProbe, PassResult
from gaverify.passes.sketches import sketch
from gaverify.passes.wrappers import THIS_RANK, is_sharded, renew_reducers
from gaverify.records.ranks import Engine, Traffic
from gaverify.torch_internals import distribute, set_default_group

_LOOPBACK = "lo"


@contextmanager
def alone() -> Iterator[None]:
    """Joins a group of world size 1, through a file: no port can be taken."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with working_folder("gaverify-ranks-") as folder:
        store = dist.FileStore(str(folder / "store"), 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def of_every_rank(value: Any, ranks: int, device: torch.device | None = None) -> list[Any]:
    """Returns what each rank gives; torch's own exchange of objects needs NumPy.

    Args:
        value: The value that this rank gives; picklable.
        ranks: R.
        device: A device that the group's backend knows; None: the CPU.
    """
    exchange_device = device or torch.device("cpu")
    packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(exchange_device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=exchange_device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(packed)], dtype=torch.int64, device=exchange_device))
    most = max(int(size) for size in sizes)
    parts = [torch.zeros(most, dtype=torch.uint8, device=exchange_device) for _ in range(ranks)]
    dist.all_gather(parts, torch.nn.functional.pad(packed, (0, most - len(packed))))
    return [pickle.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]


@dataclass(frozen=True)
class Reach:
    """The facts that decide how a model can be wrapped: which parts of it micro-batches reach.

    Args:
        unused: Whether a micro-batch leaves a parameter out; DDP waits for it for ever if it is not told.
        calls: How often each of the model's `blocks` runs in each micro-batch; 0 where the ranks do not agree. FSDP2
            gathers a block's parameters whenever it runs, so the ranks that run it wait for those that do not.
        left_out: The parameters that all of a rank's micro-batches leave out; of all ranks: those that only some do.
            FSDP2 reduces what has a gradient, and its ranks then send each other buffers of different sizes.
    """

    unused: bool
    calls: tuple[tuple[int, ...], ...]
    left_out: frozenset[str] = frozenset()


def of_all(reaches: Sequence[Reach]) -> Reach:
    """Returns what holds on every rank."""
    first = reaches[0].calls
    agreed = tuple(
        calls if all(reach.calls[at] == calls for reach in reaches) else (0,) for at, calls in enumerate(first)
    )
    left_out = [reach.left_out for reach in reaches]
    on_some_ranks = frozenset.union(*left_out) - frozenset.intersection(*left_out)
    return Reach(any(reach.unused for reach in reaches), agreed, on_some_ranks)


def wrap_model(experiment: Experiment, engine: Engine, reach: Reach) -> Experiment:
    """Returns the experiment with its model, and a loss that has parameters, under the engine.

    The process group is there.

    Args:
        experiment: With the bare model.
        engine: DDP or FSDP2.
        reach: The parts of the model that the micro-batches of all ranks reach.

    Raises:
        ProblemError: The engine refuses the model.
    """
    wrap = _wrap_in_ddp if engine is Engine.DDP else _shard_fsdp2
    try:
        return wrap(experiment, reach)
    except ProblemError:
        raise
    except Exception as error:
        raise ProblemError(f"{engine.value} refuses the model: {type(error).__name__}: {error}") from error


def _wrap_in_ddp(experiment: Experiment, reach: Reach) -> Experiment:
    def under_ddp(module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=reach.unused)

    model, loss = experiment.problem.model, experiment.problem.loss
    if isinstance(loss, nn.Module) and _trains_more(loss, model):
        loss = under_ddp(loss)
    return replace(experiment, problem=replace(experiment.problem, model=under_ddp(model), loss=loss))


def _trains_more(loss: nn.Module, model: nn.Module) -> bool:
    """Whether a loss has trainable parameters that are not the model's."""
    model_parameters = {id(parameter) for parameter in model.parameters()}
    return any(parameter.requires_grad and id(parameter) not in model_parameters for parameter in loss.parameters())


def _shard_fsdp2(experiment: Experiment, reach: Reach) -> Experiment:
    if reach.left_out:
        names = ", ".join(f"`{name}`" for name in experiment.parameters if name in reach.left_out)
        raise ProblemError(
            f"some ranks' samples give no gradient to {names}, and FSDP2 needs one on every rank or on none; "
            "use a larger batch or engine ddp"
        )
    model, loss = experiment.problem.model, experiment.problem.loss
    # the group that there is, on the model's device: by default torch takes an accelerator wherever there is one, and
    # makes a group of NCCL for it
    mesh = DeviceMesh.from_group(dist.group.WORLD, experiment.device.type)  # type: ignore[arg-type]
    for block, calls in zip(list(blocks(model)), reach.calls, strict=True):
        if all(calls):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = dict(model.named_parameters())
    if isinstance(loss, nn.Module) and _trains_more(loss, model):
        fully_shard(loss, mesh=mesh)
        parameters |= {f"loss.{name}": parameter for name, parameter in loss.named_parameters()}
    return replace(experiment, parameters={name: parameters[name] for name in experiment.parameters})


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks of the model's lists, as a user shards them; none where blocks share parameters.

    FSDP2 gathers a group of parameters when its module runs, so a parameter that two groups share has no owner.
    """
    visited: set[int] = set()
    for parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter[1]) in visited:
            return
        visited.add(id(parameter[1]))
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from (child for child in module if any(True for _ in child.parameters()))


def engine_of_word(word: str | Engine) -> Engine:
    """Returns the engine that a word names.

    Raises:
        ProblemError: None does.
    """
    try:
        return Engine(word)
    except ValueError:
        engine_names = " or ".join(f'"{engine.value}"' for engine in Engine)
        raise ProblemError(f"unknown engine {word!r}; write {engine_names}") from None


def loss_factor(experiment: Experiment, ranks: int) -> float:
    """Returns what each loss counts on a rank besides its weight.

    R, because the engines average over the ranks; 1 under the weighting `none`, which leaves losses as they are.
    """
    return 1.0 if experiment.weighting == "none" else float(ranks)


class Scaled(PassProbe):
    """A rank's own gradients, scaled as its loop scales them: the engines average over the ranks.

    Args:
        factor: R, which each micro-batch's loss counts times its weight.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts the gradients of R · `weight` · `loss` into `.grad`."""
        super().backward(k, loss, weight * self._factor)


class Alone(Scaled):
    """A rank's micro-batches without an engine; notes what they reach of the model.

    Args:
        experiment: With the bare model.
        factor: As in `Scaled`.
    """

    def __init__(self, experiment: Experiment, factor: float) -> None:
        super().__init__(factor)
        self._parameters = experiment.parameters
        self._blocks = list(blocks(experiment.problem.model))
        self._reached: list[set[str]] = []
        self._calls: list[list[int]] = [[] for _ in self._blocks]

    @property
    def reach(self) -> Reach:
        """The notes of all forwards."""
        unused = any(len(reached) < len(self._parameters) for reached in self._reached)
        left_out = set(self._parameters).difference(*self._reached)
        return Reach(unused, tuple(map(tuple, self._calls)), frozenset(left_out))

    @contextlib.contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Notes the parameters that the backward reaches, and the blocks that run."""
        reached: set[str] = set()
        self._reached.append(reached)
        with contextlib.ExitStack() as stack:
            for name, parameter in self._parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))
                stack.callback(hook.remove)
            for block, calls in zip(self._blocks, self._calls, strict=True):
                calls.append(0)
                stack.callback(block.register_forward_pre_hook(_counting(calls)).remove)
            yield


def _counting(calls: list[int]) -> Callable[..., None]:
    def count(*_: Any) -> None:
        calls[-1] += 1

    return count


def _outermost(root: Any, name: str) -> Iterator[Any]:
    """Yields the modules that have a switch of this name and lie in no other that has it."""
    if hasattr(root, name):
        yield root
    elif isinstance(root, nn.Module):
        for child in root.children():
            yield from _outermost(child, name)


class Synchronised(Scaled):
    """Reduces the gradients with a rank's last micro-batch only, as `no_sync` is meant to be used.

    Args:
        experiment: Under its engine.
        engine: Which it is.
        last: The rank's last micro-batch.
        factor: As in `Scaled`.
        shares: In a control, what the rank's losses are multiplied by in turn, the last all that follow.
    """

    def __init__(
        self, experiment: Experiment, engine: Engine, last: int, factor: float, shares: Sequence[float]
    ) -> None:
        super().__init__(factor)
        self._shares = chain(shares, repeat(shares[-1]))
        name = "no_sync" if engine is Engine.DDP else "set_requires_gradient_sync"
        self._wrappers = [
            m for root in (experiment.problem.model, experiment.problem.loss) for m in _outermost(root, name)
        ]
        self._engine, self._last = engine, last

    @contextlib.contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Leaves the reduction out of all micro-batches but the last."""
        with contextlib.ExitStack() as stack:
            for wrapper in self._wrappers:
                if self._engine is Engine.FSDP2:
                    wrapper.set_requires_gradient_sync(k == self._last)
                    wrapper.set_is_last_backward(k == self._last)
                elif k != self._last:
                    stack.enter_context(wrapper.no_sync())
            yield

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts the gradients of the rank's share of R · `weight` · `loss` into `.grad`."""
        super().backward(k, loss, weight * next(self._shares))


# A model that gaverify puts under an engine itself, as it was before: one process runs it without other ranks.
#
# The full batch is run that way on every rank, in a group of one rank: a loss that reads the number of ranks, or
# talks to them, then sees one, as in a program without a launcher. The same holds for the search for a cause.


_REGISTRIES = (
    "_parameters",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Attributes of a module that `fully_shard` changes besides its class."""


@dataclass(frozen=True)
class WithoutEngine:
    """The gradients of each rank's own micro-batches without an engine, before they are reduced."""

    sketches: Sequence[torch.Tensor]
    """The sketch of each rank's gradient."""
    calls: Traffic
    """The collectives that the model and the loss ran themselves, on the rank with the most."""
    reach: Reach
    """The parts of the model that the micro-batches of all ranks reach."""
    ambiguous_draws: bool
    """Whether draws on some rank agree with the full batch's in shape alone."""


class PlainModel:
    """The model before it is put under an engine.

    Args:
        experiment: With the plain model.
        member: This rank. Every rank has to make one.
    """

    def __init__(self, experiment: Experiment, member: Member) -> None:
        self._experiment = experiment
        self._wrapped: list[nn.Module] = []
        self._sharded: dict[str, nn.Parameter] = {}
        # Each rank's own group; torch wants every rank to take part in making all of them.
        self._group, _ = dist.new_subgroups(1)
        self._member = member
        self._modules = [_snapshot(module) for root in experiment.modules for module in root.modules()]

    @contextmanager
    def alone(self, wrapped: Experiment) -> Iterator[Experiment]:
        """Gives the experiment with the plain model, for as long as the block runs in a group of one rank.

        Args:
            wrapped: The experiment under the engine, whose draws are used again.
        """
        everyone, sharded = dist.group.WORLD, list(map(_snapshot, (module for module, _, _ in self._modules)))
        experiment = replace(
            self._experiment, draws=wrapped.draws, reading=wrapped.reading, math_kernels=wrapped.math_kernels
        )
        _put_back(self._modules)
        set_default_group(self._group)
        try:
            yield experiment.with_current_state()
        finally:
            set_default_group(everyone)
            _put_back(sharded)
            self.renew_reducers()

    def run_own(self, recorded: Experiment, full: PassResult, own: range) -> WithoutEngine:
        """Runs this rank's micro-batches among all ranks, but without an engine.

        Args:
            recorded: The plain experiment, with the draws of the full batch.
            full: The full batch.
            own: The numbers of the micro-batches.
        """
        meter, count, device = TrafficMeter(), self._member.count, self._member.device
        probe = Alone(recorded, loss_factor(recorded, count))
        with meter.counting():
            result = recorded.with_current_state().micro_batches(full, probe, own=own)
        said = of_every_rank(
            (sketch(result.gradients.values(), THIS_RANK).cpu(), meter.traffic, probe.reach, result.draws.ambiguous),
            count,
            device,
        )
        sketches, calls, reaches, ambiguous = zip(*said, strict=True)
        return WithoutEngine(sketches, max(calls, key=Traffic.count), of_all(reaches), any(ambiguous))

    def wrap(self, recorded: Experiment, engine: Engine, reach: Reach) -> Experiment:
        """Returns the experiment with its model under the engine."""
        wrapped = wrap_model(recorded, engine, reach)
        self._wrapped = [m for m in (wrapped.problem.model, wrapped.problem.loss) if isinstance(m, nn.Module)]
        self._sharded = {name: parameter for name, parameter in wrapped.parameters.items() if is_sharded(parameter)}
        return wrapped

    def renew_reducers(self) -> None:
        """Lets DistributedDataParallel hear of the weights, which may have had another type meanwhile."""
        renew_reducers(self._wrapped, hooks=True)

    def place(self, gradients: Gradients) -> Gradients:
        """Returns gradients of the plain model cut as the engine cuts the parameters."""
        parameters = self._sharded
        return {
            name: gradient if gradient is None or name not in parameters else distribute(gradient, parameters[name])
            for name, gradient in gradients.items()
        }


_Snapshot = tuple[nn.Module, type, dict[str, dict[Any, Any]]]


def _snapshot(module: nn.Module) -> _Snapshot:
    registries = {name: dict(module.__dict__[name]) for name in _REGISTRIES if name in module.__dict__}
    return module, module.__class__, registries


def _put_back(snapshots: Sequence[_Snapshot]) -> None:
    for module, kind, registries in snapshots:
        module.__class__ = kind
        for name, entries in registries.items():
            registry = module.__dict__[name]
            registry.clear()
            registry.update(entries)
