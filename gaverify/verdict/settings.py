"""What `verify` was asked to do, and what its report says was run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gaverify.passes.precision import short_name
from gaverify.passes.task import Task
from gaverify.records.comparison import Reference
from gaverify.records.verdict import RunInfo
from gaverify.verdict.judging import Judgement
from gaverify.version import __version__

Weighting = str | list[float] | tuple[float, ...] | Callable[..., float]


@dataclass(frozen=True)
class Settings:
    """What `verify` was asked to do, checked; `steps` counts the micro-batches of all ranks together."""

    steps: int
    weighting: Weighting
    device: str | torch.device | None
    dtype: torch.dtype | None
    seed: int
    mode: str | None
    autocast: torch.dtype | None
    strategy: str
    rtol: float | None
    atol: float | None
    ignore_index: int
    trace: bool
    optimizer: str
    lr: float | None
    diagnose: bool
    time_limit: float | None
    exact: bool
    reference: Reference


def run_info(task: Task, judgement: Judgement, settings: Settings) -> RunInfo:
    """Returns what was run: the model, the batch, the recipe and the arithmetic."""
    parameters = {id(p): p for module in task.modules for p in module.parameters()}
    weighting = task.weighting
    if not isinstance(weighting, str):
        weighting = getattr(weighting, "__name__", "function") if callable(weighting) else "numbers"
    return RunInfo(
        model=task.problem.name or type(task.problem.model).__name__,
        parameters=sum(p.numel() for p in parameters.values()),
        trainable=sum(p.numel() for p in task.parameters.values()),
        batch_size=task.batch_size,
        micro_batches=task.sizes,
        weights=judgement.accumulated.weights,
        weighting=weighting,
        strategy=task.strategy,
        device=" and ".join(map(str, task.devices)),
        dtype=short_name(judgement.dtype),
        seed=settings.seed,
        mode=settings.mode or "as is",
        torch=torch.__version__,
        gaverify=__version__,
        autocast=short_name(task.autocast) if task.autocast else None,
        reference=task.fitting.way,
        reference_failed=tuple(task.fitting.failed),
        rounded=tuple(f"{kind} {to}" for kind, to in judgement.rounded.items()),
        part=judgement.part,
        loss_full=judgement.full.loss,
        loss_accumulated=judgement.accumulated.loss,
    )
