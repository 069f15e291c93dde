"""The names of torch that torch does not promise, each with what happens without it.

No other module of gaverify uses a name of torch that begins with an underscore; a test searches for them. A newer torch
that moves or drops one of them is met here. Seen in torch 2.8.0, 2.13.0 and 2.14.1 unless a line says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload as DispatcherOperation
from torch.nn.modules.loss import _Loss as CriterionModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    # The base class of torch's criteria. Without it gaverify does not start.
    "CriterionModule",
    # The calls that dispatch modes see. Without them gaverify does not start: traces would hold their own calls.
    "DispatcherOperation",
    # Modes of the dispatcher. Without them gaverify does not start, because no random draw could be recorded.
    "TorchDispatchMode",
    # Nested containers. Without them gaverify does not start: users register containers with this tree alone.
    "TreeSpec",
    "current_dispatch_mode",
    "no_dispatch_modes",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

# Modules whose frames belong to the dispatcher and not to the caller of an operation.
DISPATCH_MODULE = "torch.utils._python_dispatch"
# Where the builtin functions of `torch.nn.functional` say that they live.
BUILTIN_FUNCTIONS_MODULE = "torch._C._nn"
# Where SyncBatchNorm lives, whose collectives are the engine's and not the user's.
SYNC_BATCH_NORM_MODULE = "torch.nn.modules._functions"


# Tensors and the dispatcher


def without_torch_function() -> AbstractContextManager[Any]:
    """Returns a context in which neither modes nor subclasses see a call of torch; without it gaverify raises."""
    return torch._C.DisableTorchFunction()


def without_subclass_function() -> AbstractContextManager[Any]:
    """Returns a context in which subclasses of tensors do not see a call of torch; without it gaverify raises."""
    return torch._C.DisableTorchFunctionSubclass()


def has_post_accumulate_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks run once a gradient is in `.grad`; without the name, they are seen by what they do at once."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def has_dispatch_modes() -> bool:
    """Whether a dispatch mode is active, which is cheaper to ask than to disable them."""
    return bool(torch._C._len_torch_dispatch_stack())


def without_active_modes() -> AbstractContextManager[Any]:
    """Returns a context without dispatch modes; it costs next to nothing where none is active."""
    return no_dispatch_modes() if has_dispatch_modes() else nullcontext()


def is_in_fake_mode() -> bool:
    """Whether a `FakeTensorMode` is active: operations have shapes and no values."""
    if not has_dispatch_modes():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_fake(tensor: Any) -> bool:
    """Whether a tensor is a fake one. Where nobody imported the module of fake tensors there are none."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def is_in_backward() -> bool:
    """Whether autograd is inside a backward pass: a node of the graph is being evaluated."""
    return torch._C._current_autograd_node() is not None


def is_traced_by_jit() -> bool:
    """Whether `torch.jit.trace` runs."""
    return torch._C._get_tracing_state() is not None


def is_in_functorch_transform() -> bool:
    """Whether a transform of `torch.func` runs: its tensors cannot be kept, cut or read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_functorch_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a transform of `torch.func` and cannot be read."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was written in place. BatchNorm's kernel does not count its running statistics."""
    return tensor._version


def flatten_tensors(tensors: Any) -> torch.Tensor:
    """Returns tensors laid end to end; one call in C++, because thousands from Python cost more than the copy."""
    return torch._C._nn.flatten_dense_tensors(tensors)  # type: ignore[no-any-return, attr-defined]


def surround_engine(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Runs the engine of every backward pass inside a context; without the name it runs outside, and hooks with it."""
    name = "_engine_run_backward"
    original = getattr(torch.autograd, name, None)
    if original is not None:

        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            with context():
                return original(*args, **kwargs)

        setattr(torch.autograd, name, run)


# Modules


def submodules_of(module: nn.Module) -> MutableMapping[str, Any]:
    """Returns the registry of direct submodules; `named_children` leaves out one that is registered twice."""
    return module._modules


def parameters_of(module: nn.Module) -> MutableMapping[str, Any]:
    """Returns the registry of a module's direct parameters; an entry may be None."""
    return module._parameters


def buffers_of(module: nn.Module) -> MutableMapping[str, Any]:
    """Returns the registry of a module's direct buffers; an entry may be None."""
    return module._buffers


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether forward hooks or forward pre-hooks are registered."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def backward_hooks_of(module: nn.Module) -> list[MutableMapping[int, Any]]:
    """Returns the registries of a module's backward hooks and backward pre-hooks."""
    return [module._backward_hooks, module._backward_pre_hooks]


def gradient_hooks_of(parameter: torch.Tensor) -> list[MutableMapping[int, Any]]:
    """Returns the registries of a parameter's gradient hooks that exist."""
    registries = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [registry for registry in registries if registry is not None]


# Switches of the whole process


def fp32_precision_accessors() -> tuple[Callable[[str, str], Any], Callable[[str, str, Any], Any]] | None:
    """Returns the getter and the setter of `fp32_precision` by backend and operation; None before torch 2.9."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    write = getattr(torch._C, "_set_fp32_precision_setter", None)
    return (read, write) if read is not None and write is not None else None


def set_deterministic(enabled: bool, *, warn_only: bool) -> None:
    """Sets the flag of deterministic algorithms alone.

    The public function imports the compiler as well, 820 modules and 73 MB; it is used where the private one is gone.
    """
    setter = getattr(torch._C, "_set_deterministic_algorithms", torch.use_deterministic_algorithms)
    setter(enabled, warn_only=warn_only)


def is_compiler_imported() -> bool:
    """Whether torch's compiler has been imported."""
    return "torch._dynamo" in sys.modules


def import_compiler() -> None:
    """Imports torch's compiler, which takes seconds."""
    import torch._dynamo  # noqa: F401


def compiled_frames() -> int:
    """Returns how many frames the compiler has compiled in this process."""
    module = sys.modules.get("torch._dynamo.utils")
    return int(module.counters["frames"].get("ok", 0)) if module is not None else 0


# Loaders and distributed training


def pin_memory(batch: Any) -> Any:
    """Returns a batch in pinned memory, as a `DataLoader` with `pin_memory=True` makes it."""
    from torch.utils.data._utils.pin_memory import pin_memory as pin

    return pin(batch)


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's shard of a `DTensor`, and where it begins in the whole tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def distribute(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """Returns this rank's shard of a tensor, which every rank holds whole, as a `DTensor` cut as `like` is."""
    from torch.distributed.tensor import DTensor

    # Not `distribute_tensor`: rank 0 would send what every rank has already.
    shape, offset = local_shape_and_offset(like)
    part = tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        part.contiguous(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def gather(tensor: Any) -> torch.Tensor:
    """Returns the whole tensor of a `DTensor`. Every rank has to call it."""
    return tensor.full_tensor()  # type: ignore[no-any-return]


def set_default_group(group: Any) -> None:
    """Makes a group the one that collectives without a `group` use, and whose size `get_world_size` returns."""
    torch.distributed.distributed_c10d._update_default_pg(group)


@contextmanager
def group_timeouts(seconds: float) -> Iterator[None]:
    """Lets collectives of all process groups end after so many seconds; those of NCCL end the process by their own."""
    cpu = torch.device("cpu")
    groups = [group for group in torch.distributed.distributed_c10d._world.pg_map if cpu in group._device_types]
    backends = [backend for backend in (group._get_backend(cpu) for group in groups) if hasattr(backend, "options")]
    before = [backend.options._timeout for backend in backends]
    try:
        for backend in backends:
            backend._set_default_timeout(timedelta(seconds=seconds))
        yield
    finally:
        for backend, timeout in zip(backends, before, strict=True):
            backend._set_default_timeout(timeout)


def rebuild_reducer(module: nn.parallel.DistributedDataParallel, *, with_hooks: bool) -> None:
    """Gives a DistributedDataParallel module a new reducer.

    Args:
        module: The wrapped model.
        with_hooks: Whether its communication hooks are registered with the new reducer.
    """
    parameters, sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    for hook, state in module._comm_hooks if with_hooks else ():
        torch._C._distributed_c10d._register_comm_hook(module.reducer, state, hook)
