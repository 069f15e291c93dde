"""What has to hold of the ranks of a script before anything of theirs is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gaverify.audit.request import Request
from gaverify.errors import ProblemError

if TYPE_CHECKING:
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
