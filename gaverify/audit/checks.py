"""What has to hold of runs before anything is compared: they trained, and their ranks trained alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gaverify.audit.job import Job
from gaverify.audit.request import Request
from gaverify.errors import ProblemError
from gaverify.records.audit_report import TITLES
from gaverify.records.events import Ending

if TYPE_CHECKING:
    from gaverify.audit.ending import Child
    from gaverify.audit.reading import Run

Progress = Callable[[str, int, int], None]


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


_TRAIN = "give arguments with which it trains for at least one update"


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
