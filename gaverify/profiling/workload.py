"""One update of each strategy as a training loop would write it, its peak memory and its time.

Legend: B samples in K micro-batches; the full batch is one micro-batch of B samples.

How many bytes autograd keeps for the backward is counted at the saved-tensor hooks, in a pass of its own.

Every storage that a node of the graph saves is counted once, at its full size; views share their storage, and a
storage that two nodes save is one. The model's parameters and buffers are left out: they are there anyway. The
inputs count where a node saves them, as they do for the loop that loads one micro-batch at a time. Tensors that a
custom `autograd.Function` keeps on `ctx` beside `save_for_backward` are not seen by any hook, nor is a kernel's
workspace.

Source: PyTorch documentation, "Hooks for autograd saved tensors" (torch.autograd.graph.saved_tensors_hooks).
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from gaverify.passes.batching import Problem, fresh
from gaverify.passes.experiment import Experiment
from gaverify.passes.isolation import isolated_generators, seed_everything
from gaverify.passes.modes import mode_set
from gaverify.passes.precision import counts_memory, return_freed
from gaverify.passes.user_code import explain_user_errors, loss_of, micro_batch_of
from gaverify.preparation import dtype_of, place_experiment
from gaverify.records.profile import OPTIMIZERS, Memory, Plan
from gaverify.spec import Spec
from gaverify.verification import verify


@dataclass
class Workload:
    """A problem where it shall run, cut for one strategy, ready to be updated any number of times."""

    experiment: Experiment
    seed: int
    optimizer: torch.optim.Optimizer | None = None

    def micro_batches(self) -> Iterator[Any]:
        """Yields the micro-batches one after the other, as a data loader hands them over.

        A forward may change its inputs (`batch.pop("labels")`, `x.add_`), so each pass gets new ones.
        """
        if self.experiment.steps == 1:
            yield fresh(self.experiment.problem.batch)
            return
        for k, (start, stop) in enumerate(self.experiment.bounds(), 1):
            yield fresh(micro_batch_of(self.experiment, start, stop, f"micro-batch {k} of {self.experiment.steps}"))

    def start(self) -> None:
        """Makes every pass start from the same state and the same random draws."""
        self.clear()
        seed_everything(self.seed)

    def update(self, micro_batches: Iterable[Any]) -> None:
        """Runs one window: gradients cleared, forward and backward over every micro-batch, the optimizer's step."""
        for parameter in self.experiment.parameters.values():
            parameter.grad = None
        steps, total = self.experiment.steps, None
        places = iter(["the full batch"] if steps == 1 else [f"micro-batch {k + 1} of {steps}" for k in range(steps)])
        # 1/K stands for any recipe's weight: the value of a factor changes neither time nor bytes
        for micro_batch in micro_batches:  # no enumerate: it would keep the one before alive beside the next
            where = next(places)
            with explain_user_errors(where, self.experiment):
                loss = loss_of(self.experiment, micro_batch, where)
                loss = loss if steps == 1 else loss * (1.0 / steps)
                if self.experiment.strategy == "accumulate":
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    total = loss if total is None else total + loss
            del loss, micro_batch  # the graph must not live on beside the next one
        if total is not None:
            with explain_user_errors("the summed loss", self.experiment):
                total.backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            with explain_user_errors("the optimizer's step", self.experiment):
                self.optimizer.step()

    def start_optimizer(self) -> None:
        """Makes the optimizer's state, which every update but the very first one finds there."""
        if self.optimizer is None:
            return
        for parameter in self.experiment.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Takes the gradients away and puts buffers and attributes back."""
        for parameter in self.experiment.parameters.values():
            parameter.grad = None
        self.experiment.state.restore()

    def kept_anyway(self) -> list[torch.Tensor]:
        """The parameters and buffers, whose storages are no activations."""
        return [tensor for module in self.experiment.modules for tensor in (*module.parameters(), *module.buffers())]


@contextmanager
def workload(problem: Problem, spec: Spec, plan: Plan, optimizer: str | None = None) -> Iterator[Workload]:
    """Puts a problem where the spec wants it, for as long as the block runs, and leaves everything as it was.

    Args:
        problem: The problem that the spec's factory made.
        spec: Device, precision, seed and mode.
        plan: Strategy and K.
        optimizer: "sgd", "adam" or "adamw" for an update with its step; at learning rate 0, so that the weights stay
            where they are while time and state are those of a real step.

    Raises:
        ProblemError: K does not fit, nothing is trainable, or the device is not there.
    """
    modules = [module for module in (problem.model, problem.loss) if isinstance(module, nn.Module)]
    with ExitStack() as stack:
        stack.enter_context(isolated_generators())
        stack.enter_context(mode_set(modules, spec.mode))
        experiment = place_experiment(
            stack, problem, plan.steps, spec.device, dtype_of(spec.dtype), dtype_of(spec.autocast)
        )
        experiment = replace(experiment, strategy="summed-loss" if plan.strategy == "summed-loss" else "accumulate")
        work = Workload(experiment, spec.seed)
        if optimizer is not None:
            work.optimizer = getattr(torch.optim, OPTIMIZERS[optimizer])(experiment.parameters.values(), lr=0.0)
        stack.callback(work.clear)
        yield work


def compare_with_full_batch(work: Workload, spec: Spec) -> dict[str, Any]:
    """Returns outcome, method and largest relative difference of the plan against the full batch, from `verify`."""
    verdict = verify(
        work.experiment.problem,
        steps=work.experiment.steps,
        weighting=spec.weighting,
        seed=spec.seed,
        mode=spec.mode,
        autocast=spec.autocast,
        strategy=work.experiment.strategy,
        rtol=spec.rtol,
        atol=spec.atol,
        ignore_index=spec.ignore_index,
        diagnose=False,
        batch_size=work.experiment.batch_size,
        name=spec.model,
    )
    # a difference relative to a gradient that is itself nothing but rounding says nothing
    differences = [row.relative_difference for row in verdict.parameters if not row.vanishing]
    return {
        "outcome": verdict.outcome,
        "method": verdict.method,
        "relative_difference": max(differences, default=None),
    }


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
    """Stands in the graph in a saved tensor's place; the graph drops it when it frees the tensors that it saved."""

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

            # torch 2.14 sets an attribute on the hook while it is active and deletes it from the one that it finds then
            watched_pack.__dict__ = pack.__dict__
            hooks.pack_hook = watched_pack
        enter(hooks)

    saved_tensors_hooks.__enter__ = watched_enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


# Peak device memory and time of one update.


WARM_UP = 2
"""Updates before the clock counts: kernels are chosen, caches and allocators filled."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def activation_bytes(work: Workload) -> int:
    """Returns what autograd keeps for the backward at its highest point in one update, in bytes."""
    work.start()
    meter = ActivationMeter(work.kept_anyway())
    with meter.counting():
        work.update(work.micro_batches())
    work.clear()
    return meter.peak


def peak_memory(work: Workload) -> Memory | None:
    """Returns the peak of device memory in one update, or None where nothing counts it (MPS, Windows).

    On a CPU it must be the first thing that a fresh process runs, and that process must have been started in
    `launching.ENVIRONMENT`: memory that was freed before would stay with it and hide what the update needs.
    """
    device = work.experiment.device
    if counts_memory(device):
        return _counted_peak(work, device)
    return _resident_peak(work) if device.type == "cpu" else None


def update_seconds(work: Workload, repeats: int, report: Callable[[int], None] = lambda _: None) -> list[float]:
    """Returns the time of each of `repeats` updates after `WARM_UP` more; preparing them does not count."""
    clock = _seconds_by_events if counts_memory(work.experiment.device) else _seconds
    times = []
    with _few_collections():
        for repeat in range(WARM_UP + repeats):
            work.start()
            micro_batches = list(work.micro_batches())
            # In here nothing is collected by itself, and what the last update left in cycles would fill the memory.
            gc.collect()
            seconds = clock(work, micro_batches)
            if repeat >= WARM_UP:
                times.append(seconds)
            report(repeat)
    work.clear()
    return times


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collects garbage only when asked to: a collection inside an update would be counted with it."""
    gc.collect()
    gc.freeze()  # what is there stays: the collections between updates have little to look through
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _seconds(work: Workload, micro_batches: list[Any]) -> float:
    _synchronize(work.experiment.device)
    started = time.perf_counter()
    work.update(micro_batches)
    _synchronize(work.experiment.device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _seconds_by_events(work: Workload, micro_batches: list[Any]) -> float:
    """Events on the stream: the clock is the GPU's, from the first kernel to the last."""
    module = torch.get_device_module(work.experiment.device)
    with module.device(work.experiment.device):
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        module.synchronize()
        start.record()
        work.update(micro_batches)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3  # torch gives milliseconds


def _counted_peak(work: Workload, device: torch.device) -> Memory:
    # the first update makes what stays from then on (cuBLAS workspace, kernels): it belongs to the baseline
    work.start()
    work.update(work.micro_batches())
    work.start()
    gc.collect()
    module = torch.get_device_module(device)
    module.synchronize(device)
    # Blocks that the first update freed would count as reserved in the second.
    module.empty_cache()
    module.reset_peak_memory_stats(device)
    baseline = module.memory_allocated(device)
    work.update(work.micro_batches())
    module.synchronize(device)
    peak, reserved = module.max_memory_allocated(device), module.max_memory_reserved(device)
    work.clear()
    return Memory("cuda-allocated", baseline, peak, reserved)


def _resident_peak(work: Workload) -> Memory | None:
    work.start_optimizer()
    if _reset_high_water():
        # as on a GPU: buffers of the matrix library and pages of code that stay from now on belong to the baseline
        work.start()
        work.update(work.micro_batches())
    work.start()
    gc.collect()
    return_freed()
    # Last: the mark is to begin at the baseline, with what was freed above returned already.
    _reset_high_water()
    baseline = _resident()[0]
    work.update(work.micro_batches())
    peak = _resident()[1]
    work.clear()
    _use_usual_allocator()
    if baseline is None or peak is None:
        return None
    return Memory("resident", baseline, peak)


def _use_usual_allocator() -> None:
    """Lets glibc keep freed blocks again, which `ENVIRONMENT` forbids it, so that the clock sees what training sees.

    Blocks up to 32 MiB are kept where glibc adapts by itself; see mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    with suppress(OSError, AttributeError, TypeError):  # another C library, or another system
        limit = ctypes.CDLL(None).mallopt
        limit(_MMAP_THRESHOLD, 32 * 2**20)
        limit(_TRIM_THRESHOLD, 64 * 2**20)


def _reset_high_water() -> bool:
    """Forgets the high-water mark and says whether Linux let the process do so; see proc(5), `clear_refs`."""
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as control:
        control.write("5")  # 1 to 4 clear other marks; only 5 sets VmHWM back to what is resident now
        return True
    return False


def _resident() -> tuple[int | None, int | None]:
    """Resident memory now and at its highest, in bytes."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        sizes = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status.read(), re.MULTILINE))
        if len(sizes) == 2:
            return int(sizes["VmRSS"]) * 1024, int(sizes["VmHWM"]) * 1024
    with suppress(ImportError):
        import resource

        # kilobytes on Linux, bytes on macOS; only a high-water mark, so the baseline is that of loading
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return highest, highest
    return None, None
