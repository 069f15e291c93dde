"""How many bytes autograd keeps for the backward, counted at the saved-tensor hooks.

What is counted: every storage that a node of the graph saves, once, at its full size; views share their storage, and a
storage that two nodes save is one. What is left out: the model's parameters and buffers, which are there anyway. The
inputs count where a node saves them, as they do for the loop that loads one micro-batch at a time. Tensors that a
custom `autograd.Function` keeps on `ctx` beside `save_for_backward` are not seen by any hook, nor is a kernel's
workspace.

Source: PyTorch documentation, "Hooks for autograd saved tensors" (torch.autograd.graph.saved_tensors_hooks).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

Key = tuple[str, int]


class ActivationMeter:
    """Counts the storages that autograd holds, from the moment a tensor is saved until its graph lets go of it.

    Args:
        excluded: Tensors whose storages do not count (parameters and buffers).
    """

    def __init__(self, excluded: Iterable[torch.Tensor] = ()) -> None:
        self.current = 0
        self.peak = 0
        self._excluded = {key for tensor in excluded for key, _, _ in _storages(tensor)}
        self._holders: dict[Key, int] = {}
        self._watched: dict[Key, tuple[StorageWeakRef, int]] = {}

    @contextmanager
    def counting(self) -> Iterator[ActivationMeter]:
        """Counts every graph that is recorded inside; one that outlives the block is still released correctly."""
        with (
            _recomputation_watched(self),
            saved_tensors_hooks(lambda tensor: _Holder(self, tensor), lambda holder: holder.tensor),
        ):
            yield self

    def watch(self, tensor: torch.Tensor) -> None:
        """Counts a tensor that somebody else's hook keeps, until its storage is gone.

        Nothing tells when that is, so the storages are looked at whenever something new is saved.
        """
        self._forget_expired()
        for key, size, storage in _storages(tensor):
            if key not in self._excluded and key not in self._watched:
                self._watched[key] = (StorageWeakRef(storage), size)  # type: ignore[no-untyped-call]
        self._note()

    def hold(self, key: Key, size: int) -> None:
        """Counts a storage, or one holder more of it."""
        if key in self._excluded:
            return
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self.current += size
            self._note()

    def release(self, key: Key, size: int) -> None:
        """Takes one holder away; without any the storage no longer counts."""
        if key in self._excluded:
            return
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.current -= size

    def _forget_expired(self) -> None:
        for key in [key for key, (weak, _) in self._watched.items() if weak.expired()]:  # type: ignore[no-untyped-call]
            del self._watched[key]

    def _note(self) -> None:
        self._forget_expired()
        watched = sum(size for key, (_, size) in self._watched.items() if key not in self._holders)
        self.peak = max(self.peak, self.current + watched)


class _Holder:
    """What stands in the graph in a saved tensor's place; the graph drops it when it frees what it saved."""

    __slots__ = ("_meter", "_sizes", "tensor")

    def __init__(self, meter: ActivationMeter, tensor: torch.Tensor) -> None:
        # detached: a node that saves its own output would otherwise keep itself alive
        self.tensor = tensor.detach()
        self._meter = meter
        self._sizes = [(key, size) for key, size, _ in _storages(tensor)]
        for key, size in self._sizes:
            meter.hold(key, size)

    def __del__(self) -> None:
        for key, size in self._sizes:
            self._meter.release(key, size)


def _storages(tensor: torch.Tensor) -> list[tuple[Key, int, torch.UntypedStorage]]:
    """The storages behind a tensor, each with what identifies it while it lives; sparse tensors have several."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [entry for name in names for entry in _storages(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [*_storages(tensor._indices()), *_storages(tensor._values())]
    if tensor.layout is not torch.strided:
        compressed = (tensor.crow_indices(), tensor.col_indices(), tensor.values()) if tensor.is_sparse_csr else ()
        return [entry for part in compressed for entry in _storages(part)]
    storage = tensor.untyped_storage()
    # `set_` and `.data` give one piece of memory several storage objects; an empty storage has no address
    return [((str(storage.device), storage.data_ptr() or storage._cdata), storage.nbytes(), storage)]


@contextmanager
def _recomputation_watched(meter: ActivationMeter) -> Iterator[None]:
    """Shows the meter what `torch.utils.checkpoint` saves when it runs a forward again during the backward.

    Only the innermost pair of hooks is called, and checkpointing brings its own: without this the recomputed
    activations, often the highest point of the whole window, would not be counted.
    """
    enter = saved_tensors_hooks.__enter__

    def watched_enter(hooks: Any) -> None:
        pack = hooks.pack_hook
        if type(hooks).__name__ == "_recomputation_hook":

            def watched_pack(tensor: torch.Tensor) -> Any:
                try:
                    return pack(tensor)
                finally:  # the last one that is needed leaves by an exception
                    meter.watch(tensor)

            hooks.pack_hook = watched_pack
        enter(hooks)

    saved_tensors_hooks.__enter__ = watched_enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
