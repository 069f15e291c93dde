"""One rank's window: its own micro-batches alone, then under the engine, with everything that is compared afterwards.

Shapes: R ranks, K micro-batches each; rank r runs the micro-batches r, R + r, 2R + r, … of the batch's K · R.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gaverify.errors import ProblemError
from gaverify.passes.devices import backend_of
from gaverify.passes.fingerprints import digest_of
from gaverify.passes.gradients import Gradients, PassProbe, PassResult, accumulated_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.shards import is_sharded, offset_of_shard
from gaverify.passes.task import Task
from gaverify.ranks.engines import Reach, of_all, wrapped
from gaverify.ranks.groups import joined, of_every_rank
from gaverify.ranks.loops import Alone, Synchronised
from gaverify.ranks.traffic import TrafficMeter
from gaverify.ranks.window import Window
from gaverify.records.ranks import Engine, Traffic

SAMPLED = 1 << 12  # elements per parameter of a rank's own gradient: enough to fit R weights


@dataclass(frozen=True)
class RankReport:
    """What one rank tells its parent; its gradients lie in `file`, or, where it holds a replica, in rank 0's.

    `digest` is of all bits of its reduced gradients; `samples` are elements of them, `own` of the gradients before the
    reduction, both at the same places in every rank.
    """

    file: Path | None
    digest: str
    samples: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor]
    window: Traffic
    calls: Traffic
    buffers: dict[str, torch.Tensor]
    loss: float


@dataclass(frozen=True)
class Shard:
    """The part of a gradient that a rank holds, and where in the whole it lies."""

    values: torch.Tensor | None
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Kept(ModelState):
    """A state that keeps nothing: a rank's process ends after its window."""

    def __init__(self) -> None: ...

    def before_write(self, tensor: torch.Tensor) -> None:
        """Keeps nothing."""

    def restore(self) -> None:
        """Restores nothing."""


def reported(window: Window, rank: int) -> RankReport:
    """What the process of a rank does: join the group, run its window, leave the group."""
    with (
        window.task(rank) as task,
        joined(rank, window.ranks.count, window.folder / "store", backend_of(window.ranks.devices)),
        warnings.catch_warnings(),
        window.around(),
    ):
        warnings.simplefilter("ignore")
        return _run(window, task, rank)


def _run(window: Window, bare: Task, rank: int) -> RankReport:
    count, engine = window.ranks.count, window.ranks.engine
    own = range(rank, len(bare.sizes), count)
    calls, traffic = TrafficMeter(), TrafficMeter()
    alone, reach = by_itself(window, bare, own, calls)
    task = wrapped(bare, engine, reach)
    with traffic.counting():
        share = window.shares[rank][0] if window.shares else 1.0
        probe = Synchronised(task, engine, own[-1], count, share)
        together = accumulated(window, task, Kept(), own, probe)
    shards = {name: _shard(gradient) for name, gradient in together.gradients.items()}
    file = None
    if rank == 0 or engine is Engine.FSDP2:
        file = window.folder / f"rank-{rank}.pt"
        torch.save(shards, file)
    return RankReport(
        file,
        digest_of({name: shard.values for name, shard in shards.items()}),
        {name: sampled(shard.values) for name, shard in shards.items()},
        {name: sampled(gradient) for name, gradient in alone.gradients.items()},
        traffic.traffic,
        calls.traffic,
        {name: buffer.cpu() for name, buffer in together.buffers.items()},
        together.loss,
    )


def by_itself(window: Window, task: Task, own: range, calls: TrafficMeter) -> tuple[PassResult, Reach]:
    """Returns what a rank's own micro-batches give without an engine, and what those of all ranks reach.

    Args:
        window: What to run.
        task: With the bare model.
        own: The rank's micro-batches.
        calls: Counts the collectives of the user's own code.
    """
    bare = Alone(task, window.ranks.count)
    with calls.counting():
        # a state of its own: the parent's would set the parent's number of threads again, which were not forked
        state = ModelState(task.modules, (task.problem.loss,))
        alone = accumulated(window, task, state, own, bare)
    return alone, of_all(of_every_rank(bare.reach, window.ranks.count))


def accumulated(window: Window, task: Task, state: ModelState, own: range, probe: PassProbe) -> PassResult:
    """Returns the gradient of a rank's own micro-batches.

    Raises:
        ProblemError: The model or loss raised; the message says what to change where the wrapper is the reason.
    """
    try:
        return accumulated_gradients(task, state, window.record, window.reference, probe=probe, own=own)
    except ProblemError as error:
        raise ProblemError(f"{error}{_hint(error)}") from error


def _hint(error: ProblemError) -> str:
    """What to change where the loss reads attributes that the engine's wrapper hides."""
    cause = error.__cause__
    if isinstance(cause, AttributeError) and "DistributedDataParallel" in str(cause):
        return (
            "; under DDP the loss gets the wrapper, as in training: reach the model's own attributes through "
            "`getattr(model, 'module', model)`, and run its forward through the wrapper"
        )
    return ""


def _shard(gradient: torch.Tensor | None) -> Shard:
    if gradient is None:
        return Shard(None, (), ())
    if not is_sharded(gradient):
        return Shard(gradient, (0,) * gradient.dim(), tuple(gradient.shape))
    sharded: Any = gradient
    return Shard(sharded.to_local(), offset_of_shard(sharded), tuple(sharded.shape))


def sampled(gradient: torch.Tensor | None) -> torch.Tensor:
    """Elements at even distances, in float64 on the host; none where there is no gradient."""
    if gradient is None:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    flat = (gradient.to_dense() if gradient.layout is not torch.strided else gradient).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLED) or 1].detach().to("cpu", torch.float64)


def merged(reports: list[RankReport], names: list[str], device: torch.device) -> Gradients:
    """Returns the whole gradients on a device: rank 0's replica, or every shard in its place."""
    gradients: dict[str, torch.Tensor | None] = dict.fromkeys(names)
    for report in reports:
        if report.file is None:
            continue
        for name, shard in torch.load(report.file, map_location=device, weights_only=False).items():
            if shard.values is None:
                continue
            if tuple(shard.values.shape) == shard.shape:
                gradients[name] = shard.values
                continue
            whole = gradients[name]
            if whole is None:
                whole = gradients[name] = torch.zeros(shard.shape, dtype=shard.values.dtype, device=shard.values.device)
            place = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.values.shape, strict=True))
            whole[place] = shard.values
    return gradients
