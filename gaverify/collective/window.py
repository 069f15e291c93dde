"""The window as the ranks train it: each rank its own micro-batches, reduced by the engine, with what that moved.

Shapes: R ranks, K micro-batches each; rank r runs the micro-batches r · K to r · K + K - 1 of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gaverify.collective.membership import Member
from gaverify.errors import ProblemError
from gaverify.passes.gradients import PassProbe, PassResult, accumulated_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.modes import OperationMode
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.strategy import Strategy, gradients_of_strategy
from gaverify.passes.task import Task
from gaverify.ranks.engines import Scaled, Synchronised
from gaverify.ranks.traffic import TrafficMeter
from gaverify.records.ranks import Collective, Engine
from gaverify.tracebacks import Owner, hands_over, owner_of, shown

_ENGINES = ("torch.distributed.fsdp", "torch.nn.parallel", "torch.nn.modules._functions", "torch.distributed.tensor")
"""What calls collectives for the user, `SyncBatchNorm` among it."""


@dataclass
class Moved:
    """What one window moved: collectives, and the bytes that each of its backward passes reduced."""

    meter: TrafficMeter
    reduced: list[int]


@dataclass(frozen=True)
class Trained:
    """How the ranks train: under which engine, and by whose loop.

    In controls `share` multiplies this rank's loss, and `merged` gives the loop one micro-batch of all of the rank's.
    """

    member: Member
    engine: Engine | None
    strategy: Strategy | None = None
    merged: bool = False
    share: float = 1.0

    def own(self, task: Task, rank: int | None = None) -> range:
        """The micro-batches of a rank, by default of this one."""
        steps = task.steps // self.member.count
        first = (self.member.rank if rank is None else rank) * steps
        return range(first, first + steps)

    def window(
        self, task: Task, state: ModelState, record: DrawRecord, full: PassResult, *, lift: bool = False
    ) -> tuple[PassResult, Moved]:
        """Returns the gradient that the ranks end up with, and what the window moved."""
        moved, own = Moved(TrafficMeter(), []), self.own(task)
        with moved.meter.counting(), _backwards_noted(moved):
            if self.strategy is not None:
                each = task.steps // self.member.count if self.merged else 1
                sizes = tuple(sum(task.sizes[at : at + each]) for at in range(0, task.steps, each))
                cut = replace(task, sizes=sizes)
                result = gradients_of_strategy(cut, state, record, self.strategy, self.own(cut))
            else:
                count = self.member.count
                probe: PassProbe = Scaled(count, self.share)
                if self.engine is not None:
                    probe = Synchronised(task, self.engine, own[-1], count, self.share)
                result = accumulated_gradients(task, state, record, full, lift=lift, probe=probe, own=own)
        if self.strategy is not None and not moved.reduced:
            raise ProblemError("the strategy never calls backward: no gradient is there to compare")
        return result, moved


@contextmanager
def always_reducing() -> Iterator[None]:
    """Takes every switch away that keeps an engine from reducing: the control of a window that may never have."""
    from torch.distributed.fsdp import FSDPModule

    patched = [
        (nn.parallel.DistributedDataParallel, "no_sync", lambda self: nullcontext()),
        (FSDPModule, "set_requires_gradient_sync", lambda self, *args, **kwargs: None),
        (FSDPModule, "set_requires_all_reduce", lambda self, *args, **kwargs: None),
    ]
    with ExitStack() as stack:
        for owner, name, without in patched:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, without)
        yield


@contextmanager
def _backwards_noted(moved: Moved) -> Iterator[None]:
    """Notes what each backward pass reduces: every way to call one ends in `torch.autograd.backward`."""
    plain = torch.autograd.backward

    @hands_over
    def noted(*args: Any, **kwargs: Any) -> Any:
        before = _bytes_reduced(moved.meter)
        try:
            return plain(*args, **kwargs)
        finally:
            moved.reduced.append(_bytes_reduced(moved.meter) - before)

    torch.autograd.backward = noted  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.backward = plain


def _bytes_reduced(meter: TrafficMeter) -> int:
    return meter.sizes[Collective.SCATTER] or meter.sizes[Collective.REDUCE]


class OwnCollectives(PassProbe):
    """Notes the first collective that the model's or the loss's own code calls in a forward; no engine's or layer's."""

    def __init__(self) -> None:
        self.found = ""
        self._forward = True

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Listens to one forward."""
        with OperationMode(self._ran):
            yield

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Stops listening before the engine's own reductions."""
        self._forward = False
        super().backward(k, loss, weight)

    def _ran(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._forward and not self.found and func.namespace in ("c10d", "_c10d_functional"):
            self.found = _caller()
        return func(*args, **kwargs)


def _caller() -> str:
    """Where the user's code called the collective that runs right now; "" where an engine or a layer of torch's did."""
    frame: Any = sys._getframe(1)
    while frame is not None and owner_of(frame.f_code.co_filename) is Owner.MACHINERY:
        if frame.f_globals.get("__name__", "").startswith(_ENGINES):
            return ""
        frame = frame.f_back
    return f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""
