"""One window of the ranks: what each of them is told, and the processes that they are.

Shapes: R ranks, K micro-batches each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from gaverify.passes.devices import devices_of_ranks, release_memory
from gaverify.passes.dispatch import Observed
from gaverify.passes.gradients import PassResult
from gaverify.passes.isolation import ModelState
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task
from gaverify.ranks.forking import run_forked
from gaverify.ranks.fresh import run_fresh
from gaverify.records.ranks import Engine, Shares
from gaverify.verdict.control import in_float64

Result = TypeVar("Result")


class Origin(Protocol):
    """Where a fresh process gets the problem from; must be picklable."""

    def task(self, stack: ExitStack, device: torch.device) -> Task:
        """Returns the task on a device, as the process that judges has it, for as long as `stack` is open.

        Raises:
            GaverifyError: The problem cannot be loaded, or its numbers are others than in that process.
        """


@dataclass(frozen=True)
class Ranks:
    """How many ranks there shall be, under which engine, how long they may take, and what they are.

    Args:
        count: R.
        engine: DDP or FSDP2.
        device: Where the verification in one process runs.
        timeout: Seconds for a window; None waits for ever.
        fresh: Whether processes are started afresh, rather than forked.
        origin: Where fresh ones get the problem from.
    """

    count: int
    engine: Engine
    device: torch.device
    timeout: float | None = None
    fresh: bool = False
    origin: Origin | None = None

    @property
    def devices(self) -> list[torch.device]:
        """The device of each rank."""
        return devices_of_ranks(self.device.type, self.count)


@dataclass(frozen=True)
class Window:
    """What every rank is told: the problem, what the full batch drew and showed, and what is entered around its window.

    `made` is the task in the process that judges, which forked ranks have as well; fresh ones make theirs. `lifted`:
    it is that of the float64 control.
    """

    made: Task | None
    record: DrawRecord
    reference: PassResult
    ranks: Ranks
    folder: Path
    math_kernels: bool = False
    lifted: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    shares: Shares = ()

    @contextmanager
    def task(self, rank: int) -> Iterator[Task]:
        """Gives the task of a rank, where it computes."""
        if self.made is not None:
            yield self.made
            return
        assert self.ranks.origin is not None
        with ExitStack() as stack:
            task = self.ranks.origin.task(stack, self.ranks.devices[rank])
            if self.lifted:
                state = ModelState(task.modules, (task.problem.loss,))
                task, _ = stack.enter_context(in_float64(task, state))
            yield replace(task, math_kernels=self.math_kernels, averaged_over=self.ranks.count)


def window_of(task: Task, record: DrawRecord, full: PassResult, ranks: Ranks, folder: Path) -> Window:
    """Returns the window of a task, without what no rank asks for: the full batch's gradients and the sums in them."""
    shown = Observed(target_counts=full.observed[0].target_counts)
    reference = PassResult({}, full.loss, observed=(shown,), foreign=full.foreign)
    return Window(task, record, reference, ranks, folder, task.math_kernels)


def on_ranks(work: Callable[[Window, int], Result], window: Window) -> list[Result]:
    """Returns what `work(window, rank)` returns in the process of each rank, by rank.

    Args:
        work: A function of a module: a fresh process looks it up by its name.
        window: What the ranks are told.

    Raises:
        ProblemError: A rank raised, died, or did not end in time.
    """
    ranks = window.ranks
    names = [f"rank {rank} of {ranks.count}" for rank in range(ranks.count)]
    if not ranks.fresh:
        return run_forked([(name, partial(work, window, rank)) for rank, name in enumerate(names)], ranks.timeout)
    assert window.made is not None
    there, told = window.made.device, replace(window, made=None)
    release_memory(there)
    jobs = [(name, partial(work, told, rank)) for rank, name in enumerate(names)]
    return run_fresh(jobs, there, ranks.devices, ranks.timeout)
