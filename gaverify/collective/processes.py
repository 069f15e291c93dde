"""One window of the ranks: what each of them is told, what its process does, and what it tells.

Shapes: R ranks, K micro-batches each; rank r runs the micro-batches r, R + r, 2R + r, … of the batch's K · R.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from gaverify.collective.engines import (
    Alone,
    Synchronised,
    engine_of_word,
    join_group,
    of_all,
    of_every_rank,
    wrap_model,
)
from gaverify.collective.launching import Fresh, run
from gaverify.collective.traffic import TrafficMeter
from gaverify.errors import ProblemError
from gaverify.passes.batching import batch_size_of
from gaverify.passes.devices import RANKED, available_devices, backend_of, devices_of_ranks, release_memory, with_number
from gaverify.passes.dispatch import Observed
from gaverify.passes.experiment import Experiment
from gaverify.passes.fingerprints import digest_of
from gaverify.passes.gradients import PassProbe, PassResult
from gaverify.passes.problem import Problem
from gaverify.passes.randomness import DrawLedger, Reading
from gaverify.passes.sketches import sketch
from gaverify.passes.wrappers import is_sharded
from gaverify.records.ranks import Engine, Shares, Traffic
from gaverify.verdict.settings import Settings

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """How many ranks there shall be, under which engine, how long they may take, and what they are.

    Args:
        count: R.
        engine: DDP or FSDP2.
        device: Where the verification in one process runs.
        timeout: Seconds for a window; None waits for ever.
        fresh: Whether processes are started afresh, rather than forked.
        origin: In a fresh process returns the experiment on a device, as the process that judges has it, for as long as
            the stack is open; raises GaverifyError where that is impossible. Must be picklable.
    """

    count: int
    engine: Engine
    device: torch.device
    timeout: float | None = None
    fresh: bool = False
    origin: Callable[[ExitStack, torch.device], Experiment] | None = None

    @property
    def devices(self) -> list[torch.device]:
        """The device of each rank."""
        return devices_of_ranks(self.device.type, self.count)


@dataclass(frozen=True)
class Window:
    """What every rank is told: the problem, what the full batch drew and showed, and what is entered around its window.

    `built_experiment` is that of the process that judges, which forked ranks have as well; fresh ones make theirs.
    `lifted`: it is that of the float64 control.
    """

    built_experiment: Experiment | None
    draws: DrawLedger
    reading: Reading
    reference: PassResult
    ranks: Ranks
    folder: Path
    math_kernels: bool = False
    lifted: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    shares: Shares = ()

    @property
    def gradients(self) -> Path:
        """Where the gradients lie that the ranks end up with."""
        return self.folder / "gradients.pt"

    @contextmanager
    def experiment(self, rank: int) -> Iterator[Experiment]:
        """Gives the experiment of a rank, where it computes."""
        if self.built_experiment is not None:
            yield self.built_experiment
            return
        assert self.ranks.origin is not None
        with ExitStack() as stack:
            experiment = self.ranks.origin(stack, self.ranks.devices[rank])
            if self.lifted:
                experiment = stack.enter_context(experiment.in_float64())
            yield replace(experiment, math_kernels=self.math_kernels, averaged_over=self.ranks.count)


def window_of(experiment: Experiment, full: PassResult, ranks: Ranks, folder: Path) -> Window:
    """Returns a window, without what no rank asks for: the full batch's gradients and the sums in them."""
    observed = Observed(target_counts=full.observed[0].target_counts)
    reference = PassResult({}, full.loss, observed=(observed,), foreign=full.foreign, draws=full.draws)
    return Window(experiment, experiment.draws, experiment.reading, reference, ranks, folder, experiment.math_kernels)


def on_ranks(work: Callable[[Window, int], Result], window: Window) -> list[Result]:
    """Returns what `work(window, rank)` returns in the process of each rank, by rank.

    Args:
        work: A function of a module: a fresh process looks it up by its name.
        window: What the ranks are told.

    Raises:
        ProblemError: A rank raised, died, or did not end in time.
    """
    ranks, fresh = window.ranks, None
    if ranks.fresh:
        assert window.built_experiment is not None
        fresh = Fresh(window.built_experiment.device, ranks.devices)
        release_memory(fresh.source)
        window = replace(window, built_experiment=None)
    jobs = [(f"rank {rank} of {ranks.count}", partial(work, window, rank)) for rank in range(ranks.count)]
    return run(jobs, ranks.timeout, fresh=fresh)


@dataclass(frozen=True)
class RankReport:
    """What one rank tells its parent.

    `digest` is of all bits of its reduced gradients, and `reduced` their sketch; `before_reduction` is that of its own
    before the reduction.
    """

    digest: str
    reduced: torch.Tensor
    before_reduction: torch.Tensor
    window: Traffic
    calls: Traffic
    buffers: dict[str, torch.Tensor]


def run_rank(window: Window, rank: int) -> RankReport:
    """What the process of a rank does: join the group, run its window, leave the group."""
    traffic = TrafficMeter()

    def accumulate_reduced(experiment: Experiment, own: range) -> tuple[dict[str, torch.Tensor | None], PassResult]:
        with traffic.counting():
            share = window.shares[rank][0] if window.shares else 1.0
            probe = Synchronised(experiment, window.ranks.engine, own[-1], window.ranks.count * share)
            together = accumulate_rank(window, experiment, own, probe)
        return {name: _whole(gradient) for name, gradient in together.gradients.items()}, together

    (full_gradients, together), alone, calls = under_engine(window, rank, accumulate_reduced)
    if rank == 0:
        torch.save(full_gradients, window.gradients)
    return RankReport(
        digest_of(full_gradients),
        sketch(full_gradients.values()).cpu(),
        sketch(alone.gradients.values()).cpu(),
        traffic.traffic,
        calls,
        {name: buffer.cpu() for name, buffer in together.buffers.items()},
    )


def _whole(gradient: Any) -> torch.Tensor | None:
    """A gradient with the shards of all ranks."""
    return gradient.full_tensor() if gradient is not None and is_sharded(gradient) else gradient  # type: ignore[no-any-return]


def under_engine(
    window: Window, rank: int, work: Callable[[Experiment, range], Result]
) -> tuple[Result, PassResult, Traffic]:
    """Joins the ranks' group, and runs a rank's micro-batches without an engine, to learn what those of all reach.

    Then `work` gets the experiment under the engine, and the rank's micro-batches. It must not keep the experiment: the
    engine holds the group, and one that lives on when the group is left waits for the group's threads for ever.

    Returns:
        What `work` returned, what the micro-batches gave alone, and what the user's own code sent.
    """
    count, calls = window.ranks.count, TrafficMeter()
    with (
        window.experiment(rank) as bare,
        join_group(rank, count, window.folder / "store", backend_of(window.ranks.devices)),
        warnings.catch_warnings(),
        window.around(),
    ):
        warnings.simplefilter("ignore")
        rank_range, probe = range(rank, len(bare.sizes), count), Alone(bare, count)
        with calls.counting():
            alone = accumulate_rank(window, bare, rank_range, probe)
        reach = of_all(of_every_rank(probe.reach, count))
        return work(wrap_model(bare, window.ranks.engine, reach), rank_range), alone, calls.traffic


def accumulate_rank(window: Window, experiment: Experiment, own: range, probe: PassProbe) -> PassResult:
    """Returns the gradient of a rank's own micro-batches.

    Raises:
        ProblemError: The model or loss raised; the message says what to change where the wrapper is the reason.
    """
    # a state of its own: the parent's would set the parent's number of threads again, which were not forked
    experiment = replace(experiment, draws=window.draws, reading=window.reading, lift=False).with_current_state()
    try:
        return experiment.micro_batches(window.reference, probe, own=own)
    except ProblemError as error:
        if not isinstance(error.__cause__, AttributeError) or "DistributedDataParallel" not in str(error.__cause__):
            raise
        raise ProblemError(
            f"{error}; under DDP the loss gets the wrapper, as in training: reach the model's own attributes through "
            "`getattr(model, 'module', model)`, and run its forward through the wrapper"
        ) from error


def needs_fresh(device: torch.device) -> bool:
    """Whether processes that compute there cannot be forked.

    No accelerator can be used after a fork. Where there is one, autograd has threads for it from the first backward on,
    and refuses to run on the CPU as well in a process that was forked then.
    """
    return device.type != "cpu" or len(available_devices()) > 1


def ranks_wanted(
    count: int,
    settings: Settings,
    engine: str | Engine,
    timeout: float | None,
    problem: Problem,
    device: torch.device | None,
) -> Ranks:
    """Returns what to run on ranks.

    Args:
        count: R, 2 or more.
        settings: What else is asked for; its steps are K · R.
        engine: Or its name.
        timeout: Seconds for one window; None waits for ever.
        problem: With the live model.
        device: Where the run shall be; None: where the model is.

    Raises:
        ProblemError: The problem cannot be run on ranks; the message says what to change.
    """
    if count < 2:
        raise ProblemError(f"ranks = {count}: one rank is what a run without `ranks` verifies; write ranks = 2 or more")
    if settings.strategy != "accumulate" or settings.rtol is not None:
        excluded = "rtol and atol" if settings.rtol is not None else f"strategy {settings.strategy!r}"
        raise ProblemError(f"{excluded} cannot be combined with ranks; leave one of them out")
    where = device or next((p.device for p in problem.model.parameters()), torch.device("cpu"))
    if where.type not in RANKED:
        raise ProblemError(
            f"ranks run on CPUs and on CUDA devices, not on {where}; write device='cpu', where the same faults show"
        )
    spread = {parameter.device for parameter in problem.model.parameters()}
    if device is None and len(spread) > 1:
        places = " and ".join(sorted(map(str, spread)))
        raise ProblemError(f"the model lies on {places}: a rank has one device; write device={where.type!r}")
    size = batch_size_of(problem.batch, settings.steps, problem.batch_size, problem.split)
    if words := too_small(size, settings.steps // count, count):
        raise ProblemError(words)
    if not torch.distributed.is_available():
        raise ProblemError("this torch was built without torch.distributed; ranks cannot be run")
    return Ranks(count, engine_of_word(engine), with_number(where), timeout, needs_fresh(where))


def too_small(size: int, steps: int, count: int) -> str:
    """Returns why K micro-batches for each of R ranks cannot be cut from so many samples; "" where they can."""
    if steps * count <= size:
        return ""
    each = "1 micro-batch" if steps == 1 else f"{steps} micro-batches"
    return (
        f"{count} ranks with {each} each are {steps * count} parts, which cannot be cut from a batch of "
        f"{size} samples; lower ranks or steps, or raise the batch size"
    )
