"""What the diagnosis of each planted fault of the corpus costs against the two bare passes, and the medians per code.

    python tests/benchmarks/bench_corpus.py [--seconds 0.2] [--minutes M] [--only ID …]

The problems of the corpus are tiny. So samples of each micro-batch are drawn again until the two bare passes take 0.2
s, which keeps the micro-batches' weights nearly, and what they hold; a little noise keeps samples of numbers apart. (In
turns they would be like no batch: each piece of it would be the same as the next.) Left out, with
the reason, is what cannot be enlarged so: a split of its own, passes that do not get longer, a fault that becomes
another one. One thread, processor time; a row holds the whole verification. The codes take turns, so that a run of M
minutes, which is an hour for all, has seen each of them.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import measuring
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))

import test_faults
from problems import Case, fault_codes

import gaverify
from gaverify import Problem
from gaverify.passes.batching import batch_size_of, micro_batch_sizes, take
from gaverify.passes.nesting import children, with_children

_LARGEST = 1 << 21  # samples
_ROUNDS = 3
_NOISE = 1e-2
WANTED = {"GAV202": 8.0}
_OTHERS = 12.0


class LeftOut(Exception):
    """Why a problem was not measured."""


def enlarged(case: Case, times: int) -> Problem:
    """Returns the case's problem with samples of each micro-batch drawn again, behind them.

    Raises:
        LeftOut: Its micro-batches would not be `times` as large.
    """
    problem = case.build()
    size = batch_size_of(problem.batch, case.steps, problem.batch_size, problem.split)
    if problem.split is not None:
        raise LeftOut("a split of its own")
    sizes = micro_batch_sizes(size, case.steps)
    if micro_batch_sizes(size * times, case.steps) != tuple(n * times for n in sizes):
        raise LeftOut("its ragged tail would be none")
    rows = torch.arange(size).split(list(sizes))
    more = [own[torch.randint(len(own), (len(own) * (times - 1),))] for own in rows]
    index = torch.cat([part for pair in zip(rows, more, strict=True) for part in pair])
    batch = _taken(problem.batch, index, size)
    given = None if problem.batch_size is None else problem.batch_size * times
    return replace(problem, batch=batch, batch_size=given) if times > 1 else problem


def _taken(node: Any, index: torch.Tensor, size: int) -> Any:
    """The samples `index` of a nested batch of `size` samples; numbers with a little noise."""
    entries = children(node)
    if entries is not None and not (isinstance(node, list) and len(node) == size):
        return with_children(node, [_taken(child, index, size) for _, child in entries])
    if entries is not None:
        return [node[at] for at in index.tolist()]
    if not isinstance(node, torch.Tensor) or node.dim() == 0 or len(node) != size:
        return node
    if node.layout is not torch.strided:
        raise LeftOut("a sparse batch")
    rows = node[index]
    noisy = rows.is_floating_point() and rows.dim() > 1 and not bool((rows == rows.round()).all())
    return rows * (1 + _NOISE * torch.randn(rows.shape, dtype=rows.dtype)) if noisy else rows


def bare(problem: Problem, steps: int) -> None:
    """The full batch and the micro-batches as a user would run them, with one clone of the gradients."""
    size = batch_size_of(problem.batch, steps, problem.batch_size, problem.split)
    modules = [module for module in (problem.model, problem.loss) if isinstance(module, torch.nn.Module)]
    parameters = [parameter for module in modules for parameter in module.parameters()]

    def backward(batch: Any, weight: float) -> None:
        value = problem.loss(problem.model, batch)
        value = value["loss"] if isinstance(value, dict) else getattr(value, "loss", value)
        (value * weight).backward()

    for parameter in parameters:
        parameter.grad = None
    backward(problem.batch, 1.0)
    kept = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    start = 0
    for n in micro_batch_sizes(size, steps):
        backward(take(problem.batch, start, start + n, size), 1 / steps)
        start += n
    del kept


def _seconds(run: Any) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def long_enough(case: Case, least: float) -> tuple[int, float]:
    """Returns how often the samples are repeated, and the seconds of the two bare passes.

    Raises:
        LeftOut: The passes do not get longer, or cannot be run.
    """
    times = 1
    while True:
        problem = enlarged(case, times)
        size = batch_size_of(problem.batch, case.steps, problem.batch_size)
        try:
            bare(enlarged(case, times), case.steps)
            found = min(_seconds(partial(bare, problem, case.steps)) for _ in range(2))
        except Exception as error:
            raise LeftOut(f"{times} times as many samples: {type(error).__name__}: {str(error)[:60]}") from error
        if found >= least:
            return times, found
        factor = 2 ** max(1, min(5, math.ceil(math.log2(1.1 * least / max(found, 1e-3)))))
        if size * factor > _LARGEST:
            raise LeftOut(f"{found:.2f} s with {size} samples")
        times *= factor


def measured(case: Case, least: float) -> tuple[float, float, int]:
    """Returns the ratio, the seconds of the bare passes, and B.

    Raises:
        LeftOut: See `long_enough`; or the enlarged problem has another fault.
    """
    times, _ = long_enough(case, least)
    problem = enlarged(case, times)
    size = batch_size_of(problem.batch, case.steps, problem.batch_size)
    found: list[set[str]] = []

    def verified() -> None:
        verdict = gaverify.verify(problem, steps=case.steps, **case.options)
        found.append(fault_codes(verdict))

    try:
        ours = _seconds(verified)
    except gaverify.ProblemError as error:
        raise LeftOut(f"{times} times as many samples: {str(error)[:60]}") from error
    theirs = median(_seconds(partial(bare, problem, case.steps)) for _ in range(_ROUNDS))
    codes = " ".join(sorted(found[0])) or "nothing"
    if not found[0] or not found[0] <= case.codes:
        raise LeftOut(f"{times} times as many samples make it {codes} ({ours / theirs:.1f} × time)")
    return ours / theirs, theirs, size


def in_turns(cases: Sequence[Case]) -> list[Case]:
    """Returns the cases, one of each code in turn."""
    families: dict[frozenset[str], list[Case]] = defaultdict(list)
    for case in cases:
        families[case.codes].append(case)
    return [case for turn in zip_longest(*families.values()) for case in turn if case is not None]


def main() -> None:
    """Prints a row per planted fault, the medians per code, and what was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.2, help="what the two bare passes take at least")
    parser.add_argument("--only", nargs="*", default=[case.id for case in test_faults.FAULTS])
    parser.add_argument("--minutes", type=float, default=math.inf, help="starts no further problem after these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    ratios: dict[str, list[float]] = defaultdict(list)
    left_out: list[str] = []
    for case in in_turns([case for case in test_faults.FAULTS if case.id in options.only]):
        if time.monotonic() - started > 60 * options.minutes:
            break
        torch.manual_seed(0)
        code = " or ".join(sorted(case.codes))
        try:
            ratio, seconds, size = measured(case, options.seconds)
        except LeftOut as why:
            left_out.append(f"  {code} {case.id}: {why}")
            continue
        finally:
            gc.collect()
        ratios[code].append(ratio)
        wanted = f"<= {WANTED.get(code, _OTHERS):.0f}"
        measuring.show(f"{code} {case.id} ({seconds:.2f} s, {size} samples)", f"{ratio:.1f} × time", wanted)
    for code, found in sorted(ratios.items()):
        figure = f"{median(found):.1f} × time, {min(found):.1f} to {max(found):.1f}"
        measuring.show(f"median of {len(found)}: {code}", figure, f"<= {WANTED.get(code, _OTHERS):.0f}")
    others = [ratio for code, found in ratios.items() if code not in WANTED for ratio in found]
    if others:
        measuring.show(f"median of {len(others)}: all but GAV202", f"{median(others):.1f} × time", f"<= {_OTHERS:.0f}")
    print(f"left out, {len(left_out)}:", *left_out, sep="\n")


if __name__ == "__main__":
    main()
