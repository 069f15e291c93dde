"""The process that stands between the user's and the ranks: it judges alone in a group of one, then runs the ranks.

The user's process never joins a process group. Code that asks `torch.distributed` for its rank, or gathers, finds
a group of world size 1 in the coordinator, and that of the R ranks in theirs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from gaverify.children.launching import ended_as_interrupted, working_folder
from gaverify.errors import ProblemError
from gaverify.passes.batching import batch_size_of
from gaverify.passes.devices import RANKED, available_devices, with_number
from gaverify.passes.problem import Problem
from gaverify.ranks.engines import engine_of_word
from gaverify.ranks.launching import Fresh, run, told
from gaverify.ranks.window import Ranks
from gaverify.records.ranks import Engine
from gaverify.verdict.settings import Settings

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
Answer = TypeVar("Answer")
Progress = Callable[[str, int, int], None]


def coordinated(
    work: Callable[[Progress], Answer], progress: Progress | None, afresh: torch.device | None = None
) -> Answer:
    """Returns what `work` returns in a process of its own; it is given a `progress` that reports in this one.

    Args:
        work: What to run.
        progress: Told how far it is.
        afresh: None forks. A device: the process is a fresh one, which computes there; `work` must be picklable.

    Raises:
        GaverifyError: What `work` raised.
    """
    if afresh is None:
        _import_compiler()
    with ended_as_interrupted(), working_folder("gaverify-ranks-") as folder:
        job = "the verification", partial(_judged, work, folder)
        fresh = Fresh(afresh, [afresh]) if afresh is not None else None
        (answer,) = run([job], heard=progress or (lambda *words: None), fresh=fresh)
    return answer  # type: ignore[no-any-return]


def _import_compiler() -> None:
    """Imports torch's compiler, which both engines import, for seconds: here once, not in every fork.

    The import makes a folder for what is compiled and notes it in the environment; here nothing is compiled.
    """
    known = os.environ.get(_COMPILED)
    import torch._dynamo  # noqa: F401

    made = os.environ.get(_COMPILED)
    if known is None and made is not None:
        del os.environ[_COMPILED]
        with suppress(OSError):  # not empty: it was there before
            os.rmdir(made)


def _judged(work: Callable[[Progress], Answer], folder: Path) -> Answer:
    # temporary files of a process that is killed would stay; the folder around them goes with this one
    tempfile.tempdir = str(folder)
    return work(told)


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
        other = "rtol and atol" if settings.rtol is not None else f"strategy {settings.strategy!r}"
        raise ProblemError(f"{other} cannot be combined with ranks; leave one of them out")
    where = device or next((p.device for p in problem.model.parameters()), torch.device("cpu"))
    if where.type not in RANKED:
        raise ProblemError(
            f"ranks run on CPUs and on CUDA devices, not on {where}; write device='cpu', where the same faults show"
        )
    spread = {parameter.device for parameter in problem.model.parameters()}
    if device is None and len(spread) > 1:
        places = " and ".join(sorted(map(str, spread)))
        raise ProblemError(f"the model lies on {places}: a rank has one device; write device={where.type!r}")
    total, steps = settings.steps, settings.steps // count
    size = batch_size_of(problem.batch, total, problem.batch_size, problem.split)
    if total > size:
        each = "1 micro-batch" if steps == 1 else f"{steps} micro-batches"
        raise ProblemError(
            f"{count} ranks with {each} each are {total} parts, which cannot be cut from a batch of "
            f"{size} samples; lower ranks or steps, or raise the batch size"
        )
    if not torch.distributed.is_available():
        raise ProblemError("this torch was built without torch.distributed; ranks cannot be run")
    return Ranks(count, engine_of_word(engine), with_number(where), timeout, needs_fresh(where))
