"""Two forked ranks that train under DDP or FSDP2, with the recorder in place or without: what they send and store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import join_group, run_each
from torch import nn

from gaverify.collective.membership import TrafficMeter
from gaverify.records.events import Ending
from gaverify.records.ranks import Engine, Traffic

RANKS, STEPS, UPDATES = 2, 2, 2


@dataclass(frozen=True)
class Trained:
    """What one rank did: collectives that the dispatcher saw, the group's own count of them, seconds, bytes stored."""

    traffic: Traffic
    collectives: int
    seconds: float
    stored: int


def trained(folder: Path, engine: Engine, width: int, *, recorded: bool, updates: int = UPDATES) -> list[Trained]:
    """Returns what each rank did.

    Args:
        folder: Empty; where the ranks meet and record.
        engine: What the model is wrapped in.
        width: Of its two square layers.
        recorded: With the recorder of an audit in place.
        updates: How many are made.
    """

    def rank(number: int) -> Callable[[], Trained]:
        return lambda: _train(folder, number, engine, width, recorded, updates)

    return run_each([rank(number) for number in range(RANKS)])


def _train(folder: Path, rank: int, engine: Engine, width: int, recorded: bool, updates: int) -> Trained:
    from gaverify.audit.child import install_recorder
    from gaverify.audit.job import Command, Job

    own = folder / f"rank-{rank}"
    own.mkdir()
    # One update more than are made: the process stays.
    job = Job(Command("train.py", ranks=RANKS), "accumulated", updates + 1, folder=str(own))
    recorder = install_recorder(job, own) if recorded else None
    meter = TrafficMeter()
    with join_group(rank, RANKS, folder / "store"), meter.counting():
        begun = time.monotonic()
        _loop(engine, width, updates)
        seconds = time.monotonic() - begun
        collectives = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
    if recorder is not None:
        recorder.close(Ending.SCRIPT)
    stored = sum(path.stat().st_size for path in own.glob("*.pt"))
    return Trained(meter.traffic, collectives, seconds, stored)


def _loop(engine: Engine, width: int, updates: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, width, device="cpu"), nn.Tanh(), nn.Linear(width, width, device="cpu"))
    model = _wrapped(net, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(updates):
        for k in range(STEPS):
            with _synchronised(model, engine, k == STEPS - 1):
                (model(torch.randn(4, width, device="cpu")).square().mean() / STEPS).backward()
        optimizer.step()
        optimizer.zero_grad()


def _wrapped(net: nn.Module, engine: Engine) -> nn.Module:
    if engine is Engine.DDP:
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net)


def _synchronised(model: nn.Module, engine: Engine, last: bool) -> contextlib.AbstractContextManager[None]:
    if engine is Engine.DDP:
        return contextlib.nullcontext() if last else model.no_sync()  # type: ignore[operator,no-any-return]
    model.set_requires_gradient_sync(last)  # type: ignore[operator]
    return contextlib.nullcontext()
