"""Runs the child processes of an audit: at most two at once, each ended with everything that it started.

What has to hold of their records before anything is compared: they trained, and their ranks trained alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gaverify.audit.ending import Child, check, output_of, progress_so_far
from gaverify.audit.job import Job
from gaverify.audit.launch import ERROR, folders_of, rank_that_failed
from gaverify.audit.outputs import take_away
from gaverify.audit.request import Request
from gaverify.children.launching import started
from gaverify.errors import ProblemError
from gaverify.records.audit_report import TITLES
from gaverify.records.events import Ending

if TYPE_CHECKING:
    from gaverify.audit.reading import Run

_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys\n"
    "if not sys.flags.safe_path: sys.path.pop(0)\n"
    "root = {root!r}\n"
    "if root not in sys.path: sys.path.append(root)\n"
    "from gaverify.audit.child import main\n"
    "main({job!r})\n"
)
_TRAIN = "give arguments with which it trains for at least one update"
_TICK = 0.05
_LINGER = 0.5  # seconds: when a rank fails the others lose their connections, and may be seen to fail before it
_PATIENCE = 5.0  # seconds that a launcher has to end the other ranks when one has failed


def run_jobs(jobs: Sequence[tuple[Job, str]], timeout: float, progress: Callable[[str], None]) -> list[Child]:
    """Runs jobs side by side until all have ended.

    Args:
        jobs: Each with the command that it stands for.
        timeout: Seconds for each.
        progress: Told what is running.

    Raises:
        NoView: The kernel makes no view of the files.
        ProblemError: A script failed, hung, or was killed; the message holds its own traceback and last output.
    """
    progress(" and ".join(TITLES[job.role] for job, _ in jobs))
    children: list[Child] = []
    try:
        children += [_start(job, command) for job, command in jobs]
        failed = _wait(children, timeout)
    finally:
        for child in children:
            if child.kept is not None:
                child.kept.end()
            for folder in folders_of(child.folder) if child.job.files == "guard" else ():
                take_away(folder)
    for child in [failed] if failed is not None else children:
        check(child, children)
    for child in children:
        child.write()
    return children


def _start(job: Job, command: str) -> Child:
    child = Child(job, command)
    child.folder.mkdir(parents=True, exist_ok=True)
    if job.meeting is not None:
        job.meeting.mkdir(exist_ok=True)
    code = _BOOT.format(root=_ROOT, job=child.describe())
    with (child.folder / "log.txt").open("wb") as log:
        child.kept = started(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(job),
        )
    child.started = time.monotonic()
    return child


def _environment(job: Job) -> dict[str, str]:
    """The variables of a run; all runs order sets of strings alike, or they might order their data differently."""
    fixed = {"PYTHONHASHSEED": str(job.seed or 0)}
    if job.seed is None and os.environ.get("PYTHONHASHSEED"):
        fixed = {}
    eager = {"TORCH_COMPILE_DISABLE": "1"} if job.eager else {}
    return {**os.environ, **fixed, **dict(job.environment), **eager}


def _wait(children: Sequence[Child], timeout: float) -> Child | None:
    """Waits for all; one that fails ends the wait and is returned: nothing can be compared any more."""
    open_children = list(children)
    while open_children:
        for child in list(open_children):
            child.seconds = time.monotonic() - child.started
            if child.done:
                open_children.remove(child)
                if child.status and not child.has_all:
                    return _first_of(children)
            elif child.job.launcher and rank_that_failed(child.folder, _PATIENCE):
                return child
            elif child.seconds > timeout:
                raise ProblemError(
                    f"the {child.title} was still running after {timeout:g} s and was ended (--timeout): "
                    f"{child.command}\n{progress_so_far(child, children)}{output_of(child)}"
                )
        if open_children:
            time.sleep(_TICK)
    return None


def _first_of(children: Sequence[Child]) -> Child:
    """Returns the child that failed first: one that was killed says nothing, and the others fail because of it."""
    limit = time.monotonic() + _LINGER
    while time.monotonic() < limit and any(child.status is None for child in children):
        time.sleep(_TICK)
    failed = [child for child in children if child.status and not child.has_all]
    silent = [child for child in failed if not (child.folder / ERROR).exists()]
    return (silent or sorted(failed, key=lambda child: (child.folder / ERROR).stat().st_mtime_ns))[0]


def check_ranks(request: Request, seen: list[int]) -> None:
    """Raises unless the script trained in as many ranks as were started."""
    if set(seen) != {len(seen)}:
        counts = ", ".join(map(str, sorted(set(seen))))
        option = f"--ranks {len(seen)}" if request.ranks is not None else "--launcher"
        if max(seen) > len(seen):
            raise ProblemError(
                f"{option}: the script trains in {max(seen)} processes, and {len(seen)} of them could be recorded; "
                "they have to be started anew (torchrun, `mp.spawn`), not forked from a process that has imported torch"
            )
        raise ProblemError(
            f"{option}: the script's process group had {counts} of {len(seen)} ranks at its first step; "
            "it has to call torch.distributed.init_process_group with the RANK and WORLD_SIZE of its environment, as "
            "under torchrun"
        )


def check_parameters(runs: Sequence[Run]) -> None:
    """Raises unless every rank trains the same parameters, whole or in shards.

    What one leaves out goes on alone in the others.
    """
    if any(run.meta.get("flattened") for run in runs):
        raise ProblemError(
            "FullyShardedDataParallel cuts the model into flat pieces, which cannot be held against the parameters "
            "of one process; wrap the model with `fully_shard` (FSDP2) or DistributedDataParallel for the audit"
        )
    known = [{key.partition(":")[2]: shape for key, shape in run.parameters.values()} for run in runs]
    for rank, own in enumerate(known):
        named = list(dict.fromkeys([*known[0], *own]))
        apart = [name for name in named if known[0].get(name) != own.get(name)]
        if apart:
            shown = ", ".join(f"`{name}`" for name in apart[:5]) + (f" and {len(apart) - 5} more" * (len(apart) > 5))
            raise ProblemError(
                f"the ranks train different parameters: {shown} in the optimizers of one of ranks 0 and {rank} "
                "alone, or in other shapes; give the optimizers of all ranks the same parameters"
            )


def check_updates(child: Child, run: Run) -> None:
    """Raises unless the script trained.

    Args:
        child: The process.
        run: What it recorded.

    Raises:
        ProblemError: It made no step, or stepped without any gradient.
    """
    backwards = any(event.kind == "backward" for event in run.events)
    if not any(event.kind == "step" for event in run.events):
        if run.meta["by_hand"] and not child.job.by_hand:
            return  # it is run again
        seen = f"backward passes, but no optimizer step; {_TRAIN}" if backwards else _instead(child.job, run)
        raise ProblemError(_sentence(child, run, "reached no optimizer step", f"it made {seen}"))
    if not backwards and not run.meta["had_gradients"]:
        raise ProblemError(_sentence(child, run, "stepped without any backward pass and without a gradient", _TRAIN))


def _instead(job: Job, run: Run) -> str:
    """What a script did that was seen to train nothing, with what would help."""
    if run.meta.get("processes") and not job.launcher:
        return (
            f"no update in its own process, and started {run.meta['processes']} others; if those train, write "
            "`--launcher python` so that they are recorded"
        )
    if run.meta.get("elsewhere"):
        return (
            "backward passes of tensors that are no `nn.Parameter`, whose updates cannot be judged; make the weights "
            "an `nn.Parameter` that an optimizer of `torch.optim` holds"
        )
    if any("capture" in why for why in run.meta["left_out"]):
        return (
            "calls inside the capture of a CUDA graph, whose replays are not seen; run it without the graph for the "
            "audit, or step the optimizer outside it"
        )
    if run.meta["left_out"].get("torch.func"):
        return (
            "gradients with `torch.func` for weights that no module or optimizer holds, which cannot be judged; assign "
            "them to the `.grad` of a module's parameters and step an optimizer of `torch.optim`"
        )
    return f"neither a backward pass nor an optimizer step; {_TRAIN}"


def _sentence(child: Child, run: Run, what: str, advice: str) -> str:
    left = Ending(run.meta["reason"]) is Ending.EXIT
    how = f"it left with sys.exit({run.meta['status']})" if left else "it ran to its end"
    return f"the {TITLES[child.job.role]} {what} ({how}): {child.command}\n{advice}"
