"""Peak device memory and time of one update."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from gaverify.passes.devices import counts_memory, return_freed
from gaverify.profiling.workload import ActivationMeter, Workload
from gaverify.records.profile import Memory

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
