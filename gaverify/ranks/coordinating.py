"""The process that stands between the user's and the ranks: it judges alone in a group of one, then runs the ranks.

The user's process never joins a process group. Code that asks `torch.distributed` for its rank, or gathers, finds
a group of world size 1 in the coordinator, and that of the R ranks in theirs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import TypeVar

import torch

from gaverify.children import ended_as_interrupted, working_folder
from gaverify.errors import ProblemError
from gaverify.passes.batching import batch_size_of
from gaverify.passes.problem import Problem
from gaverify.ranks.confirming import Ranks
from gaverify.ranks.forking import run_forked
from gaverify.ranks.relaying import Relay
from gaverify.records.ranks import Engine

Answer = TypeVar("Answer")
Progress = Callable[[str, int, int], None]


def coordinated(work: Callable[[Progress | None], Answer], progress: Progress | None) -> Answer:
    """Returns what `work` returns in a forked process; it is given a `progress` that reports in this one.

    Raises:
        GaverifyError: What `work` raised.
    """
    relay = None if progress is None else Relay(progress)
    try:
        with ended_as_interrupted(), working_folder("gaverify-ranks-") as folder:

            def judged() -> Answer:
                # temporary files of a process that is killed would stay; the folder around them goes with this one
                tempfile.tempdir = str(folder)
                return work(None if relay is None else relay.send)

            waiting = (lambda: None) if relay is None else relay.drain
            (answer,) = run_forked([("the verification", judged)], waiting=waiting)
    finally:
        if relay is not None:
            relay.close()
    return answer  # type: ignore[no-any-return]


def _engine_of(word: str | Engine) -> Engine:
    """Returns the engine that a word names.

    Raises:
        ProblemError: None does.
    """
    try:
        return Engine(word)
    except ValueError:
        known = " or ".join(f'"{engine.value}"' for engine in Engine)
        raise ProblemError(f"unknown engine {word!r}; write {known}") from None


def ranks_wanted(
    count: int,
    steps: int,
    engine: str | Engine,
    timeout: float | None,
    problem: Problem,
    device: torch.device | None,
    strategy: str,
    rtol: float | None,
) -> Ranks:
    """Returns what to run on ranks.

    Args:
        count: R, 2 or more.
        steps: K, the micro-batches of each.
        engine: Or its name.
        timeout: Seconds for one window; None waits for ever.
        problem: With the live model.
        device: Where the run shall be; None: where the model is.
        strategy: As `verify` takes it.
        rtol: As `verify` takes it.

    Raises:
        ProblemError: The problem cannot be run on ranks; the message says what to change.
    """
    if count < 2:
        raise ProblemError(f"ranks = {count}: one rank is what a run without `ranks` verifies; write ranks = 2 or more")
    if strategy != "accumulate" or rtol is not None:
        other = "rtol and atol" if rtol is not None else f"strategy {strategy!r}"
        raise ProblemError(f"{other} cannot be combined with ranks; leave one of them out")
    where = device or next((p.device for p in problem.model.parameters()), torch.device("cpu"))
    if where.type != "cpu":
        raise ProblemError(
            f"ranks are forked processes, which cannot compute on {where}; write device='cpu', where the same faults "
            "show, or audit the training script under its launcher"
        )
    total, size = count * steps, batch_size_of(problem.batch, count * steps, problem.batch_size, problem.split)
    if total > size:
        each = "1 micro-batch" if steps == 1 else f"{steps} micro-batches"
        raise ProblemError(
            f"{count} ranks with {each} each are {total} parts, which cannot be cut from a batch of "
            f"{size} samples; lower ranks or steps, or raise the batch size"
        )
    if not torch.distributed.is_available():
        raise ProblemError("this torch was built without torch.distributed; ranks cannot be run")
    return Ranks(count, _engine_of(engine), timeout)
