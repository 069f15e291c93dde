"""What a process of an audit is asked to do, by gaverify or through a launcher such as torchrun. No torch.

A job is the script, its arguments and the part it plays, as plain JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gaverify.records.ranks import Shares

Files = Literal["view", "guard", "in-place"]
"""How a run is kept from the user's files; see `gaverify.audit.outputs`."""

Role = Literal["full", "perturbed", "accumulated", "frozen", "events"]
"""`full` records its random draws, and `perturbed` moves the weights by one unit roundoff before their first use.

`accumulated` gets the draws of the full-batch run. `frozen` also undoes every optimizer step, so that all micro-batches
see the first weights. `events` stores no gradients.
"""

Order = Literal["turns", "blocks"]
"""How ranks share the samples of a batch, which their own loaders hand out: row by row, or block by block."""

Replay = Literal["", "samples", "batches", "inputs"] | Order
"""What a replay gives besides draws: the samples of loaders, collated anew; their batches as they were collated, where
that draws; the inputs of forwards as well; nothing, to ranks."""


@dataclass(frozen=True)
class Job:
    """One run of the user's script: how it is started, what it records, and what a control changes."""

    role: Role
    """Which run of the audit this is: `full`, `perturbed`, `accumulated`, `frozen` or `events`."""
    script: str
    """Path of the script, or the module's name with `module`."""
    module: bool
    """Run as `python -m script`."""
    arguments: tuple[str, ...]
    """`sys.argv[1:]` of the script."""
    folder: str
    """Path of the folder that the run writes its records into."""
    updates: int
    """Optimizer updates after which the script is stopped; 0: it runs to its end."""
    source: str | None = None
    """Record folder of the full-batch run, or of one rank of it, that this run reads; None: reads none."""
    unit: float = 0.0
    """Unit roundoff by which the perturbed run moves the weights, relative; 0.0 in other runs."""
    perturb_early: bool = False
    """Move the weights when an optimizer is made, for a script without modules."""
    math_kernels: bool = False
    """Run attention on its unfused kernel, whose random draws can be replayed."""
    float32: bool = False
    """Compute in float32 what the script computes in lower precision."""
    eager: bool = False
    """Run without `torch.compile`: draws inside a compiled graph cannot be replayed."""
    lead: bool = True
    """Step with the gradients recorded in `source`, so that each update starts from the same weights."""
    files: Files = "view"
    """`view`: private view of all files; `guard`: end before a file changes; `in-place`: write as the script does."""
    environment: tuple[tuple[str, str], ...] = ()
    """(variable, value) pairs added to this run's environment; empty: none."""
    values: tuple[tuple[str, str], ...] = ()
    """(name, replacement) pairs for values in the script's source; empty: the source runs unchanged."""
    seed: int | None = None
    """Seeds Python's, NumPy's and torch's generators before the script starts; None: no seeding."""
    by_hand: bool = False
    """The script has no optimizer: changed weights mark a step, and their change replaces a missing `.grad`."""
    replay: Replay = ""
    """What is recorded for replay, or replayed from `source`, besides draws inside the model; empty: nothing."""
    parts: int = 0
    """Micro-batches per batch of the full-batch run, for a replay; 0: not known."""
    tail: int = 0
    """Micro-batches in a short last window that ends every pass over a loader; 0: no change."""
    shrink: float = 1.0
    """Factor on the loss gradients of every backward pass; 1.0: no change."""
    term: int = 0
    """Number, from 1, of the only loss term that is differentiated; 0: all terms."""
    coins: int = 0
    """Seed of the random directions in which the perturbed run moves the weights."""
    cleared: bool = False
    """Clear the gradients before every backward pass, and look for the line that overwrites them."""
    shown_as: str = ""
    """Name of a control run in the report; empty: the role is its name."""
    world: tuple[int, int, int] | None = None
    """Rank, number of ranks and rendezvous port, set as torchrun would; None: no such variables are set."""
    launcher: tuple[str, ...] = ()
    """Words of the command that starts the script's processes; empty: gaverify runs the script."""
    sources: tuple[str, ...] = ()
    """Record folders of all ranks of the full-batch run, for the random draws; empty without `source`."""
    shares: Shares = ()
    """Per rank, the factors on its backward passes' loss gradients, in turn; empty: no factors."""
    synchronise: bool = False
    """Reduce gradients over the ranks in every backward pass, also inside `no_sync`."""
    gathers: bool = False
    """Let gathers of trained tensors pass the gradient back."""
    frozen: tuple[str, ...] = ()
    """Buffers, `model:name`, whose modules run in evaluation mode with their current statistics; empty: none."""
    restored: tuple[str, ...] = ()
    """Module values restored before each micro-batch, or (`EVERYTHING`,); empty: none."""
    outputs: bool = False
    """Record each module call's outputs and output gradients per row, in update number `updates` only."""
    moved: tuple[str, ...] = ()
    """Module paths, or `SCRIPT`, whose calls return changed values for the second half of the rows; empty: none."""
    held: tuple[str, ...] = ()
    """Module paths, or `SCRIPT`, whose outputs and input gradients are replaced by the full batch's; empty: none."""
    spots: tuple[tuple[tuple[int, tuple[int, ...]] | None, ...], ...] = ()
    """Per rank and forward: the full-batch forward's number and its rows; None: forward returns nothing per row."""
    given_back: float = 1.0
    """Factor on the input gradients that replaced code returns: the number of ranks that average them."""

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
    def has_ranks(self) -> bool:
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
