"""What the benchmarks share: a language model of 30 million parameters, its bare passes, ratios and peak memory.

Shapes: B = 8 rows of T = 128 tokens in K = 4 micro-batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
_HIGH_WATER = (
    "import sys; sys.path[:0] = [{root!r}, {here!r}]; import {module} as m; m.{function}(*{arguments!r}); "
    "print(m.measuring.peak())"
)


def bare(problem: Any, autocast: str | None = None) -> None:
    """The full batch and the micro-batches as a user would run them, with one clone of the gradients."""
    import torch

    from gaverify.passes.batching import batch_size_of, take
    from gaverify.passes.precision import DTYPES

    model, size = problem.model, batch_size_of(problem.batch, STEPS, problem.batch_size, None)
    kind = next(model.parameters()).device.type
    held = None
    for count in (1, STEPS):
        model.zero_grad()
        for start in range(0, size, size // count):
            with torch.autocast(kind, DTYPES[autocast] if autocast else None, enabled=autocast is not None):
                loss = problem.loss(model, take(problem.batch, start, start + size // count, size))
            (loss / count).backward()
        held = held or [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()


def seconds(run: Callable[[], object]) -> float:
    """Returns the wall-clock seconds of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def ratio(measured: Callable[[], object], base: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Returns the median of the paired ratios measured : base, and both medians in seconds; run in turns."""
    base()
    measured()
    pairs = [(seconds(measured), seconds(base)) for _ in range(rounds)]
    return median(a / b for a, b in pairs), median(a for a, _ in pairs), median(b for _, b in pairs)


def command(words: Sequence[str]) -> Callable[[], object]:
    """Returns a call that runs a command in a fresh process and checks that it left with 0."""
    return lambda: subprocess.run(words, check=True, capture_output=True, cwd=ROOT)


def peak() -> int:
    """Returns the high-water mark of this process's resident memory in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def peak_of(module: str, function: str, *arguments: str) -> int:
    """Returns the peak memory in bytes of a function of a benchmark, in a fresh process."""
    here = str(Path(__file__).parent)
    code = _HIGH_WATER.format(root=str(ROOT), here=here, module=module, function=function, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout.split()[-1]))


def show(name: str, figure: str, wanted: str) -> None:
    """Prints one line of results."""
    print(f"{name:<58} {figure:<34} wanted {wanted}", flush=True)
