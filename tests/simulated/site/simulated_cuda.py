"""Puts the simulated device in CUDA's place: loads the library, and lets `torch.cuda` answer for it.

The library has to be loaded before torch, which looks for its devices once. `torch.cuda`'s functions are replaced when
it is imported, not before: a process that never imports torch pays nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
import time
import warnings
from typing import Any

_MEMORY = 8 << 30


def load(library: str) -> None:
    """Arranges for the device to be there as soon as torch is imported."""
    assert "torch" not in sys.modules, "torch has looked for its devices already"
    sys.meta_path.insert(0, _Finder(library))


class _Finder(importlib.abc.MetaPathFinder):
    """Sees the import of torch: loads torch's libraries with the device's before, and replaces functions after it."""

    def __init__(self, library: str) -> None:
        self._library = library

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            ctypes.CDLL(self._library, mode=ctypes.RTLD_GLOBAL)
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _replace(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Context:
    """The device's context: made by the first use, as on a real device, and useless in a fork made after it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.initialised = self.forked = False
        self._queued: list[Any] = []
        os.register_at_fork(after_in_child=self._fork)

    def _fork(self) -> None:
        self.forked = self.initialised

    def initialise(self) -> None:
        """Makes the context; what was asked for before (`manual_seed`) is done now."""
        if self.forked:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. Use the 'spawn' start method")
        if not self.initialised:
            self.initialised = True
            queued, self._queued = self._queued, []
            for call in queued:
                call()

    def later(self, call: Any) -> None:
        """Calls now where there is a context, else once there is one."""
        if self.initialised:
            call()
        else:
            self._queued.append(call)


def _replace(torch: Any) -> None:
    """Replaces what `torch.cuda` would ask the driver."""
    cuda, ours = torch.cuda, torch.ops.simulated
    context = _Context(torch)
    generator = ours.generator()

    def needs_context(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            context.initialise()
            return function(*args, **kwargs)

        return call

    def set_state(state: Any, device: Any = "cuda") -> None:
        generator.set_state(state)

    def seed_all(seed: int) -> None:
        context.later(lambda: generator.manual_seed(int(seed)))

    capture, lazy_clone = _Capture(ours), torch._lazy_clone
    # CUDA's fused kernels (foreach, clipping, optimizers) write past copy-on-write, so that both see what is written
    torch._lazy_clone = lambda tensor: tensor.detach() if tensor.is_cuda else lazy_clone(tensor)
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": needs_context(lambda: 0),
        "set_device": lambda device: None,
        "_lazy_init": context.initialise,
        "init": context.initialise,
        "is_initialized": lambda: context.initialised and not context.forked,
        "_is_in_bad_fork": lambda: context.forked,
        "default_generators": (generator,),
        "manual_seed": seed_all,
        "manual_seed_all": seed_all,
        "seed": needs_context(generator.seed),
        "initial_seed": needs_context(generator.initial_seed),
        "get_rng_state": needs_context(lambda device="cuda": generator.get_state()),
        "set_rng_state": needs_context(set_state),
        "get_rng_state_all": needs_context(lambda: [generator.get_state()]),
        "set_rng_state_all": needs_context(lambda states: [generator.set_state(state) for state in states] and None),
        "synchronize": lambda device=None: ours.count_synchronisation("synchronize"),
        "set_sync_debug_mode": lambda mode: ours.warn_of_synchronisations(mode in ("warn", 1)),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: ours.live_bytes(),
        "memory_reserved": lambda device=None: ours.live_bytes(),
        "max_memory_allocated": lambda device=None: ours.peak_bytes(),
        "max_memory_reserved": lambda device=None: ours.peak_bytes(),
        "reset_peak_memory_stats": lambda device=None: ours.reset_peak(),
        "mem_get_info": lambda device=None: (_MEMORY - ours.live_bytes(), _MEMORY),
        "get_device_name": lambda device=None: "simulated",
        "get_device_properties": lambda device=None: _Properties,
        "get_device_capability": lambda device=None: (8, 0),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": _CurrentDevice,
        "is_current_stream_capturing": lambda: capture.running,
        "graph": lambda *args, **kwargs: capture,
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    _replace_storages(torch)
    _replace_collectives(torch)


class _Capture:
    """The capture of a CUDA graph, as far as it refuses what the host would have to wait for; nothing is replayed."""

    def __init__(self, ours: Any) -> None:
        self._ours, self._before = ours, 0
        self.running = False

    def __enter__(self) -> None:
        self.running, self._before = True, self._ours.synchronisations()

    def __exit__(self, *error: Any) -> None:
        self.running = False
        if self._ours.synchronisations() > self._before:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class _Properties:
    name, total_memory, major, minor, multi_processor_count = "simulated", _MEMORY, 8, 0, 1


class _Event:
    """Work is done when it is asked for, so that an event has happened when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, *args: Any) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Waits for nothing."""

    def elapsed_time(self, other: _Event) -> float:
        return (other._at - self._at) * 1e3


class _Stream:
    """There is one, in which everything is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def wait_event(self, event: Any) -> None:
        """Waits for nothing."""

    wait_stream = wait_event

    def synchronize(self) -> None:
        """Waits for nothing."""


class _CurrentDevice:
    """`with torch.cuda.device(0)`: there is only one."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> _CurrentDevice:
        return self

    def __exit__(self, *exception: Any) -> bool:
        return False


def _replace_storages(torch: Any) -> None:
    """Storages have functions of their own to be copied by, which `torch.save` uses: by way of a tensor here."""
    storage, set_storage = torch.UntypedStorage, torch.ops.aten.set_.source_Storage
    originals = {name: getattr(storage, name) for name in ("clone", "to", "cpu", "resize_")}

    def bytes_of(self: Any) -> Any:
        return set_storage(torch.empty(0, dtype=torch.uint8, device=self.device.type), self)

    def moved(self: Any, kind: str) -> Any:
        return bytes_of(self).to(kind).untyped_storage()

    def clone(self: Any) -> Any:
        simulated = self.device.type == "cuda"
        return bytes_of(self).clone().untyped_storage() if simulated else originals["clone"](self)

    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        kind = torch.device(device).type
        if "cuda" not in (kind, self.device.type):
            return originals["to"](self, device=device, non_blocking=non_blocking)
        return self if kind == self.device.type else moved(self, kind)

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return originals["resize_"](self, size)
        if size > self.size():
            bytes_of(self).resize_(size)
        return self  # what would be freed stays: whoever frees it asks for the same size again

    storage.clone, storage.to, storage.resize_ = clone, to, resize
    storage.cuda = lambda self, device=None, non_blocking=False: to(self, device="cuda")
    storage.cpu = lambda self: moved(self, "cpu") if self.device.type == "cuda" else originals["cpu"](self)


_COLLECTIVES = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "allgather_",
    "_allgather_base_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "barrier",
)


def _replace_collectives(torch: Any) -> None:
    """Collectives go through the host, as gloo's do; gloo itself is built without a device here, and fails on one."""
    if not torch.distributed.is_available():
        return
    from torch.utils._pytree import tree_flatten, tree_map_only

    def through_host(operation: Any) -> Any:
        def kernel(*args: Any) -> Any:
            host = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), args)
            result = operation(*host)
            work = result[-1] if isinstance(result, tuple) else result
            work.wait()
            for there, here in zip(tree_flatten(args)[0], tree_flatten(host)[0], strict=True):
                if isinstance(there, torch.Tensor) and there.device.type == "cuda":
                    there.copy_(here)
            return (args[0], work) if isinstance(result, tuple) else work

        return kernel

    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's own kernels are replaced
        for name in _COLLECTIVES:
            if hasattr(torch.ops.c10d, name):
                library.impl(name, through_host(getattr(torch.ops.c10d, name)), "CUDA", allow_override=True)
    torch.simulated_collectives = library  # the kernels last as long as the library
