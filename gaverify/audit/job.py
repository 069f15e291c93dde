"""What a child process is told: the script, its arguments and the part it plays. Plain JSON, no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Role = Literal["full", "perturbed", "accumulated", "frozen", "events"]

COMPILED = "compiled graph"
"""Stands among the kernels that draw out of sight; the runs are then made without compilation."""

DISK_FULL = 97
"""Exit status of a child that could not write what it recorded."""

RECORDER_FAILED = 98
"""Exit status of a child whose recorder failed: a fault in gaverify."""

SCRIPT_FAILED = 96
"""Exit status of a child whose script raised."""


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
        source: Folder of the full-batch run (draws).
        unit: Unit roundoff by which weights are moved.
        perturb_early: Move weights when an optimizer takes them, for a script without modules.
        eager: Run without compilation: draws inside a compiled graph cannot be replayed.
        math_kernels: Run attention on its unfused kernel, whose draws can be replayed.
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

    def write(self, path: Path) -> None:
        """Writes the job for the child to read."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Reads what `write` wrote."""
        words = json.loads(path.read_text(encoding="utf-8"))
        words["arguments"] = tuple(words["arguments"])
        return cls(**words)
