"""What a verdict costs on image models: the smallest member of each family of timm, against the two bare passes.

    python tests/benchmarks/bench_families.py [--only FAMILY …] [--memory]

A family is a module of `timm.models`. Its member is the one with the fewest parameters that takes a batch of pictures;
nobody picks it by hand. The pictures grow from 32 pixels until the bare passes take 0.2 s, at most to the size that the
model was made for; a member whose bare passes take more than 2.5 s is left out, so that all end within 40 minutes.
Processor time on one thread, after a first verdict that imports everything; with `--memory` the ratio of the high-water
marks of fresh processes as well. The truth is found without gaverify: both gradients in float64, without dropout and
dropped paths. Last come the median, 95 % and the worst ratio of each outcome.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from statistics import median
from typing import Any

import measuring
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gaverify
from gaverify import Problem

ROWS, CLASSES, STEPS = 8, 10, measuring.STEPS
SIDES = (32, 64, 96, 128, 160, 192, 224, 256)
LEAST = 0.2  # seconds of the bare passes, below which the start of a verification would be measured
MOST = 2.5  # seconds of the bare passes: a verdict of 20 times as much takes 50 s, and there are a hundred families
LARGEST = 150_000_000  # parameters: 0.6 GB, of which a verdict holds a few copies in float64
DIFFERS = 1e-6  # relative, in float64: rounding is 1e-12, samples that interact make 1e-3 and more
# Of torchvision, which timm imports and whose kernels no build for this torch has.
_OPERATORS = ("nms", "qnms", "qroi_align", "deform_conv2d", "_deform_conv2d_backward")
_OPERATORS += tuple(f"{kind}{name}" for name in ("roi_align", "roi_pool") for kind in ("", "ps_"))
_OPERATORS += tuple(f"_{kind}{name}_backward" for name in ("roi_align", "roi_pool") for kind in ("", "ps_"))


def _import_timm() -> Any:
    try:
        import timm
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor input) -> Tensor")
        import timm

        _import_timm.__dict__["library"] = library  # the operators go with it
    return timm


def families() -> dict[str, list[str]]:
    """Returns the names of the models of each family."""
    timm = _import_timm()
    return {module: timm.list_models(module=module) for module in timm.list_modules()}


def problem_of(name: str, side: int) -> Problem:
    """Builds a model of timm for 10 classes, with a batch of noise."""
    timm = _import_timm()
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES).train()
    batch = torch.randn(ROWS, 3, side, side), torch.randint(CLASSES, (ROWS,))
    return Problem(model, _loss, batch)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    found = model(batch[0])
    outputs = found if isinstance(found, torch.Tensor) else found[0]  # a classifier and its distilled twin
    return cross_entropy(outputs, batch[1])


def smallest(names: list[str]) -> tuple[str, int] | None:
    """Returns the member with the fewest parameters that runs in time, and the side of its pictures; None without."""
    timm = _import_timm()
    sizes = {}
    for name in names:
        try:
            with torch.device("meta"):
                sizes[name] = sum(p.numel() for p in timm.create_model(name, num_classes=CLASSES).parameters())
        except Exception:  # one that reads its own weights while it is built
            continue
    for name in sorted((name for name in sizes if sizes[name] <= LARGEST), key=lambda each: sizes[each])[:3]:
        own = (timm.get_pretrained_cfg(name).input_size if timm.get_pretrained_cfg(name) else (3, 224, 224))[-1]
        for side in sorted({*(side for side in SIDES if side <= own), own}):
            try:
                problem = problem_of(name, side)
                for _ in range(2):  # the first one prepares kernels
                    took = _processor_time(lambda problem=problem: measuring.bare(problem))  # type: ignore[misc]
                    if took > 2 * MOST:
                        return None  # the next ones have more parameters
            except Exception:  # pictures of this side do not fit
                continue
            if took > MOST:
                return None
            if took >= LEAST or side == own:
                return name, side
    return None


def _processor_time(run: Callable[[], object]) -> float:
    gc.collect()
    started = time.process_time()
    run()
    return time.process_time() - started


def diverges(problem: Problem) -> bool:
    """Whether the two gradients differ in float64, by a loop of this file's own."""
    model = deepcopy(problem.model).double()
    for module in model.modules():
        if type(module).__name__ in ("DropPath", "DropBlock2d") or isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    inputs, targets = problem.batch[0].double(), problem.batch[1]
    state = deepcopy(model.state_dict())
    found = []
    for parts in (1, STEPS):
        model.load_state_dict(state)
        model.zero_grad()
        for part in torch.arange(ROWS).chunk(parts):
            (_loss(model, (inputs[part], targets[part])) / parts).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return bool(len(found[0]) != len(found[1]) or (found[0] - found[1]).norm() > DIFFERS * found[0].norm())


def in_fresh_process(kind: str, name: str, side: str) -> None:
    """Runs one side, for the measurement of memory."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    problem = problem_of(name, int(side))
    measuring.bare(problem) if kind == "bare" else gaverify.verify(problem, steps=STEPS)


def row(family: str, name: str, side: int, *, memory: bool) -> tuple[str, float]:
    """Prints what one model costs; returns its outcome and the ratio."""
    problem = problem_of(name, side)
    measuring.bare(problem)
    bare = min(_processor_time(lambda: measuring.bare(problem)) for _ in range(3))
    truth = diverges(problem)
    verdicts: list[gaverify.Verdict] = []
    took = _processor_time(lambda: verdicts.append(gaverify.verify(problem, steps=STEPS)))
    (verdict,) = verdicts
    codes = ", ".join(finding.code for finding in verdict.findings if finding.severity == "fault")
    outcome = verdict.outcome.value
    is_right = outcome == ("divergent" if truth else "equivalent")
    figure = f"{took / bare:.1f} × time"
    if memory:
        peaks = [
            measuring.peak_of("bench_families", "in_fresh_process", k, name, str(side)) for k in ("verify", "bare")
        ]
        figure += f", {peaks[0] / peaks[1]:.2f} × memory"
    told = f"{outcome} {codes or verdict.method}" + ("" if is_right else " WRONG")
    measuring.show(f"{family}: {name} at {side} ({bare:.2f} s): {told}", figure, "<= 8" if truth else "<= 2")
    return outcome if is_right else "wrong", took / bare


def main() -> None:
    """Prints a row per family, then the ratios of each outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gaverify.verify(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.MSELoss(), (torch.ones(8, 4),) * 2)
    ratios: dict[str, list[float]] = {}
    for family, names in families().items():
        if options.only and family not in options.only:
            continue
        chosen = smallest(names)
        if chosen is None:
            measuring.show(family, "no member runs in time", "-")
            continue
        try:
            outcome, ratio = row(family, *chosen, memory=options.memory)
        except gaverify.GaverifyError as error:
            measuring.show(f"{family}: {chosen[0]}", str(error).splitlines()[0][:60], "-")
            continue
        ratios.setdefault(outcome, []).append(ratio)
    for outcome, found in ratios.items():
        found.sort()
        at = {"median": median(found), "95 %": found[int(0.95 * (len(found) - 1))], "worst": found[-1]}
        figure = ", ".join(f"{word} {value:.1f}" for word, value in at.items())
        measuring.show(f"{outcome} ({len(found)})", figure, "-")


if __name__ == "__main__":
    main()
