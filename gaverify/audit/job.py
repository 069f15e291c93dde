"""What a child process is told: the script, its arguments and the part it plays. Plain JSON, no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gaverify.records.ranks import Shares

Files = Literal["view", "guard", "in-place"]
"""How a run is kept from the user's files; see `gaverify.audit.outputs`."""

Role = Literal["full", "perturbed", "accumulated", "frozen", "events"]

COMPILED = "compiled graph"
"""Stands among the kernels that draw out of sight; the runs are then made without compilation."""

DISK_FULL = 97
ROOM = "room.json"  # the bytes that a run would store, and those that are free
"""Exit status of a child that could not write what it recorded."""

RECORDER_FAILED = 98
"""Exit status of a child whose recorder failed: a fault in gaverify."""

SCRIPT_FAILED = 96
"""Exit status of a child whose script raised."""

SCRIPT = "(script)"
"""Stands for the script's own code among the paths of modules."""


@dataclass(frozen=True)
class Job:
    """One run of the user's script.

    Args:
        role: "full" keeps random draws; "perturbed" moves the weights by one unit roundoff before their first use;
            "accumulated" is dealt the draws of the full run; "frozen" is "accumulated" with every optimizer step
            undone, so that all micro-batches see the first weights; "events" stores no gradients.
        script: Path of a file, or the name of a module where `module` is set.
        arguments: `sys.argv[1:]` of the script.
        folder: Where the run writes.
        updates: Optimizer updates after which the script is stopped; 0 lets it run to its end.
        source: Folder of the full-batch run, or of the same rank of it: gradients to step with, samples.
        shares: What each rank's backward passes multiply their losses' gradients by, in turn; empty leaves them alone.
        synchronise: Let every backward pass reduce over the ranks, whatever the script asks for.
        gathers: Let gathers of trained tensors hand the gradient back.
        frozen: Buffers, `model:name`, whose modules run in evaluation mode, with the statistics that they hold.
        at: The update whose forwards are listened to, or held.
        outputs: Keep what every module of that update's forwards gives for each row, and what comes back for it.
        moved: Paths of modules, or `SCRIPT`: what the calls that they make give them has other values in the second
            half of each forward's rows.
        held: Paths of modules, or `SCRIPT`, whose own code gives and gives back what it did in the full-batch run.
        spots: For each forward of that update where its rows lie in the full-batch run: the number of the forward
            there, and their places in it; None where the forward belongs to the held code.
        sources: Folders of all ranks of the full-batch run: draws.
        unit: Unit roundoff by which weights are moved.
        perturb_early: Move weights when an optimizer takes them, for a script without modules.
        lead: Step with the gradients of the run at `source`, so that each update starts from that run's weights.
        eager: Run without compilation: draws inside a compiled graph cannot be replayed.
        math_kernels: Run attention on its unfused kernel, whose draws can be replayed.
        files: "view" gives the run its own view of all files, "guard" ends it before it changes one that was there, and
            "in-place" lets it write as it does without gaverify.
        environment: Variables that this run alone is given.
        values: Names in the source, and the words to put there.
        seed: Seeds every generator before the script starts.
        by_hand: The script moves its weights itself: it has made a step where they have moved. Where it keeps no
            `.grad`, what it takes away from them stands for the gradient.
        replay: Keep the loaders' samples and the loop's draws ("full"), or take those of the run in `source`.
        collated: In a replay, cut micro-batches from the batches as they were collated: their collation draws.
        order: In a replay by several ranks, how they share the samples of a batch, which their own loaders hand out.
        inputs: In a replay, keep the forwards' inputs as well, or put those of the run in `source` in place.
        tail: Micro-batches of a short last window that every pass over a loader ends with; 0 leaves passes alone.
        parts: Micro-batches per batch of the full-batch run, for a replay; 0 where that is not known.
        coins: Which of the directions the weights are moved in by chance; another number moves them otherwise.
        shrink: What every backward pass multiplies its losses' gradients by.
        term: Number of the one term of each loss that is differentiated, from 1; 0 differentiates the whole.
        cleared: Clear the gradients before every backward pass, and look for the line that writes them.
        shown_as: What a control is called in the report; empty for the runs that are compared, which have their role.
        world: Rank, number of ranks and port of the rendezvous, where the script is started as a launcher would.
        launcher: The words of the command that starts the script's processes; empty where gaverify runs it itself.
    """

    role: Role
    script: str
    module: bool
    arguments: tuple[str, ...]
    folder: str
    updates: int
    source: str | None = None
    unit: float = 0.0
    perturb_early: bool = False
    math_kernels: bool = False
    eager: bool = False
    lead: bool = True
    files: Files = "view"
    environment: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    seed: int | None = None
    by_hand: bool = False
    replay: bool = False
    collated: bool = False
    order: Literal["", "turns", "blocks"] = ""
    inputs: bool = False
    parts: int = 0
    tail: int = 0
    shrink: float = 1.0
    term: int = 0
    coins: int = 0
    cleared: bool = False
    shown_as: str = ""
    world: tuple[int, int, int] | None = None
    launcher: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    shares: Shares = ()
    synchronise: bool = False
    gathers: bool = False
    frozen: tuple[str, ...] = ()
    at: int = 1
    outputs: bool = False
    moved: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    spots: tuple[tuple[int, tuple[int, ...]] | None, ...] = ()

    @property
    def rank(self) -> int:
        """The rank that the run plays; 0 where it is alone."""
        return self.world[0] if self.world is not None else 0

    @property
    def meeting(self) -> Path | None:
        """A folder that all ranks of the run see; None where it is alone."""
        if self.launcher:
            return Path(self.folder).parent  # each process has a folder of its own beside the others'
        return Path(self.folder).parent / f"ranks-{self.world[2]}" if self.world is not None else None

    @property
    def ranked(self) -> bool:
        """Whether several processes may train together in the run."""
        return self.ranks > 1 or (bool(self.launcher) and self.world is None)

    @property
    def ranks(self) -> int:
        """How many processes train together in the run."""
        return self.world[1] if self.world is not None else 1

    def write(self, path: Path) -> None:
        """Writes the job for the child to read."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Reads what `write` wrote."""
        return cls(**tuples(json.loads(path.read_text(encoding="utf-8"))))


def tuples(value: Any) -> Any:
    """Returns what JSON held, with tuples where it has lists."""
    if isinstance(value, dict):
        return {key: tuples(member) for key, member in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value
