"""Wrapped models: their engine, tensors in shards on several ranks, and what a conversion made of wrapped parameters.

A sharded module gathers into, and from, buffers that it made at its first forward, in the precision of then. They
are put aside with the policy, and made again. DistributedDataParallel listens to nodes of the graph that torch lets
go of when a parameter changes its type: it would never reduce again, during a control or after.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gaverify.errors import ProblemError
from gaverify.records.ranks import Engine
from gaverify.torch_internals import local_shape_and_offset, rebuild_reducer


@dataclass(frozen=True)
class RankSum:
    """Makes numbers of one rank those of all: shards are added up, of replicas the mean is taken."""

    count: int
    """R, the number of ranks."""
    add_up: Callable[[torch.Tensor], torch.Tensor]
    """Returns the sum of a tensor over the ranks, the same bits on each; every rank has to call it."""


THIS_RANK = RankSum(1, lambda numbers: numbers)
"""Numbers of this rank alone: for a shard, those of its own part."""


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`; asked without an import of torch's package for them, which takes long."""
    return hasattr(tensor, "placements")


def offset_of_shard(tensor: Any) -> tuple[int, ...]:
    """Returns where the shard of this process begins in the whole tensor, one index per dimension."""
    return local_shape_and_offset(tensor)[1]


def local(tensor: Any) -> torch.Tensor:
    """Returns what this process holds of a tensor: its shard, or all of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def share_of(tensor: Any, ranks: int) -> float:
    """Returns what a square of this process's part counts: one over the ranks that hold the same part."""
    if not is_sharded(tensor):
        return 1.0 / ranks
    parts = 1
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        parts *= size if placement.is_shard() else 1
    return parts / ranks


def shard_number(tensor: Any) -> int:
    """Returns the number of this process's shard among those of a tensor; 0 where it holds all of it."""
    number = 0
    if is_sharded(tensor):
        for at, placement in enumerate(tensor.placements):
            if placement.is_shard():
                number = number * tensor.device_mesh.size(at) + tensor.device_mesh.get_local_rank(at)
    return number


_live: WeakKeyDictionary[nn.Module, tuple[Any, Any]] = WeakKeyDictionary()
"""The reducer, and its logger, of each module whose reducer was renewed: a state that was taken before has the old."""
_MADE = ("_sharded_param_data", "all_gather_outputs", "_unsharded_param", "_sharding_spec")


def sharded_modules(modules: list[nn.Module]) -> list[Any]:
    """Returns the modules that `fully_shard` was called on."""
    return [module for root in modules for module in root.modules() if hasattr(module, "set_requires_gradient_sync")]


def engine_of(models: Iterable[nn.Module]) -> Engine | None:
    """Returns what reduces the gradients of models, `fsdp2` before `ddp`, by its switches; None where nothing does."""
    modules = [module for model in models for module in model.modules()]
    switches = {"set_requires_gradient_sync": Engine.FSDP2, "require_backward_grad_sync": Engine.DDP}
    return next((engine for name, engine in switches.items() if any(hasattr(m, name) for m in modules)), None)


def tensor_parallel(models: Sequence[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
    """Whether ranks hold parts of the same layers: shards that `fully_shard` has not made, or not alone."""
    sharded: list[Any] = [parameter.data for parameter in parameters if is_sharded(parameter.data)]
    # `fully_shard` cuts each parameter along one dimension of the mesh; a second cut is tensor parallelism.
    most = 1 if engine_of(models) is Engine.FSDP2 else 0
    return any(sum(not placement.is_replicate() for placement in data.placements) > most for data in sharded)


def is_flattened(models: Iterable[nn.Module]) -> bool:
    """Whether one of these models is cut by FSDP's first version, into flat pieces that are no parameter's shard."""
    # Importing it takes longer than everything else that is done before a verdict.
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")  # where nobody imported it is none
    return fsdp is not None and any(
        isinstance(module, fsdp.FullyShardedDataParallel) for model in models for module in model.modules()
    )


def settle(modules: list[nn.Module]) -> None:
    """Puts sharded modules back to before a pass: one may end without a backward, or with gradients unreduced."""
    for module in sharded_modules(modules):
        # The window of before may have ended inside `no_sync`.
        module.set_requires_gradient_sync(True)
        state = module._get_fsdp_state()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        for group in _groups(module):
            group._training_state = idle
            group._partial_reduce_output = None  # of a reduction over shards alone, where replicas of them are left
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        module.reshard()


def _groups(module: Any) -> list[Any]:
    """The groups of parameters that a sharded module gathers at once.

    Raises:
        ProblemError: This torch keeps them elsewhere.
    """
    try:
        state = module._get_fsdp_state()
        return list(getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]))
    except AttributeError as error:
        raise ProblemError(
            f"gaverify cannot read the gathered parameters of `fully_shard` in torch {torch.__version__}; "
            "use another version, or DDP"
        ) from error


@contextmanager
def dividing(modules: list[nn.Module], factors: Sequence[float | None] = ()) -> Iterator[tuple[float | None, ...]]:
    """Lets sharded modules divide what they reduce by some factors; yields those that they had.

    Args:
        modules: The model, and the loss where it is a module.
        factors: As this yielded them; none: all take the mean over the ranks, whatever the user's code set.
    """
    groups = [group for module in sharded_modules(modules) for group in _groups(module)]
    had = tuple(getattr(group, "gradient_divide_factor", None) for group in groups)
    try:
        for group, factor in zip(groups, factors or (None,) * len(groups), strict=True):
            group.gradient_divide_factor = factor
        yield had
    finally:
        for group, factor in zip(groups, had, strict=True):
            group.gradient_divide_factor = factor


def keep_reducers() -> None:
    """Gives modules back the reducers that listen, after a state from before they were renewed was restored."""
    for module, (reducer, logger) in list(_live.items()):
        vars(module).update(reducer=reducer, logger=logger)


@contextmanager
def shards_in(modules: list[nn.Module], dtype: torch.dtype | None) -> Iterator[None]:
    """Holds the sharded parameters of some modules in another precision, without their mixed precision policies.

    Args:
        modules: The model, and the loss where it is a module.
        dtype: None leaves everything as it is.

    Raises:
        ProblemError: This torch keeps its buffers elsewhere.
    """
    with ExitStack() as stack:
        for module in sharded_modules(modules) if dtype is not None else ():
            groups, state = _groups(module), module._get_fsdp_state()
            module.reshard()
            _exchange(stack, state, "_mp_policy", type(state._mp_policy)())
            for group in groups:
                stack.callback(group._init_mp_dtypes)  # once the policy is back
                _exchange(stack, group, "mp_policy", type(group.mp_policy)())
                for parameter in group.fsdp_params:
                    _exchange_tensors(stack, parameter, dtype or parameter.sharded_param.dtype)
                group._init_mp_dtypes()
            stack.callback(module.reshard)
        yield


def _exchange(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _exchange_tensors(stack: ExitStack, held: Any, dtype: torch.dtype) -> None:
    """Exchanges the tensors of one parameter and lets go of what was made for the old ones."""
    parameter = held.sharded_param
    if not is_sharded(parameter):
        return
    saved = {name: getattr(held, name) for name in _MADE if hasattr(held, name)}
    data, inner, spec = parameter.data, parameter._local_tensor, parameter._spec

    def put_back() -> None:
        parameter.grad = None
        _set(parameter, data, inner, spec)
        for name in _MADE:
            held.__dict__.pop(name, None)
        for name, value in saved.items():
            setattr(held, name, value)

    stack.callback(put_back)
    parameter.grad = None
    lifted = data.to(dtype)
    _set(parameter, lifted, lifted._local_tensor, lifted._spec)
    # Buffers of the old precision: they are made again at the next gathering.
    held.all_gather_outputs = []
    held.__dict__.pop("_unsharded_param", None)
    held.reset_sharded_param()


def _set(parameter: Any, data: torch.Tensor, inner: torch.Tensor, spec: Any) -> None:
    parameter.data = data
    parameter._local_tensor, parameter._spec = inner, spec


def renew_reducers(modules: list[nn.Module], *, hooks: bool) -> None:
    """Lets DistributedDataParallel listen to parameters whose type has changed, as it does when it is unpickled.

    Args:
        modules: The model, and the loss where it is a module.
        hooks: Whether its communication hooks go on: one that compresses belongs to the precision it was written for.
    """
    for module in (module for root in modules for module in root.modules()):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            rebuild_reducer(module, with_hooks=hooks)
            _live[module] = module.reducer, module.logger


@contextmanager
def hooks_left_out(modules: list[nn.Module]) -> Iterator[None]:
    """Lets DistributedDataParallel take the mean itself, without communication hooks."""
    renew_reducers(modules, hooks=False)
    try:
        yield
    finally:
        renew_reducers(modules, hooks=True)
