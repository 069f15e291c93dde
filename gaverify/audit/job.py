"""Runs of the user's script: their commands, their roles in the audit, and what they change; plain JSON, no torch."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from gaverify.audit.changes import Change, Changes, PerturbWeights, UndoSteps, decode_change, encode_change

Files = Literal["view", "guard", "in-place"]
"""How a run is kept from the user's files; see `gaverify.audit.outputs`."""

Role = Literal["full", "accumulated", "events"]
"""`full` and `accumulated` have the arguments of these runs; `events` is the only run of an audit without gradients."""

AChange = TypeVar("AChange", bound=Change)


@dataclass(frozen=True)
class Command:
    """How the user's script is started."""

    script: str
    """Path of the script, or the module's name with `module`."""
    module: bool = False
    """Run as `python -m script`."""
    arguments: tuple[str, ...] = ()
    """`sys.argv[1:]` of the script."""
    launcher: tuple[str, ...] = ()
    """Words of the command that starts the script's processes; empty: gaverify runs the script."""
    environment: tuple[tuple[str, str], ...] = ()
    """(variable, value) pairs added to the environment; empty: none."""
    values: tuple[tuple[str, str], ...] = ()
    """(name, replacement) pairs for values in the script's source; empty: the source runs unchanged."""
    seed: int | None = None
    """Seeds Python's, NumPy's and torch's generators before the script starts; None: no seeding."""
    ranks: int = 0
    """Size of the process group that gaverify's own launcher makes; 0: one process without a group, or a launcher's."""

    def __str__(self) -> str:
        head = [*(self.launcher or ["python"]), *(["-m"] if self.module else []), self.script]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        values = [f"with {name}={word}" for name, word in self.values]
        return " ".join([*variables, shlex.join([*head, *self.arguments]), *values])


@dataclass(frozen=True)
class Run:
    """One run of the user's script."""

    command: Command
    """How it is started."""
    role: Role
    """Which of the audit's runs it is."""
    updates: int
    """Optimizer updates after which the script is stopped; 0: it runs to its end."""
    sources: tuple[str, ...] = ()
    """Record folders of all ranks of the full-batch run that this run follows; empty: it follows none."""
    changes: Changes = ()
    """What it does otherwise than the script alone."""
    shown_as: str = ""
    """Name of a control in the report; empty: `kind` is its name."""

    @property
    def kind(self) -> str:
        """The role; `perturbed` and `frozen` for the two controls that have names of their own in reports."""
        return "perturbed" if self.find(PerturbWeights) else "frozen" if self.find(UndoSteps) else self.role

    @property
    def name(self) -> str:
        """How the report calls the run."""
        return self.shown_as or self.kind

    @property
    def is_reference(self) -> bool:
        """Whether other runs follow this one: it keeps its random draws and its buffers for them."""
        return self.role == "full" and not self.sources

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the command and the changes add."""
        # A change has to win over a variable of the user's: a control with `TORCH_COMPILE_DISABLE=0` would be none.
        changed = {name: value for change in self.changes for name, value in change.environment.items()}
        return {**dict(self.command.environment), **changed}

    def find(self, kind: type[AChange]) -> AChange | None:
        """Returns the run's change of a class; None where it has none."""
        return next((change for change in self.changes if isinstance(change, kind)), None)


@dataclass(frozen=True, kw_only=True)
class Job(Run):
    """A run as its processes are given it: its only one, its launcher, and then each process under that."""

    folder: str
    """Path of the folder that the process writes its records into."""
    files: Files = "view"
    """`view`: private view of all files; `guard`: end before a file changes; `in-place`: write as the script does."""
    port: int = 0
    """Port of the loopback where rank 0 of gaverify's own launcher listens; 0: no such launcher."""

    @property
    def source(self) -> Path | None:
        """The folder of the full-batch run, or of its rank 0; None: it follows none."""
        return Path(self.sources[0]) if self.sources else None

    @property
    def is_launched(self) -> bool:
        """Whether a launcher starts its processes, each of which has a folder of its own in the run's."""
        return bool(self.command.launcher or self.command.ranks)

    @property
    def has_ranks(self) -> bool:
        """Whether several processes may train together in the run."""
        return self.is_launched and self.command.ranks != 1

    @property
    def meeting(self) -> Path | None:
        """A folder that all processes under a launcher see; None where there is no launcher."""
        return Path(self.folder).parent if self.is_launched else None

    def write(self, path: Path) -> None:
        """Writes the job for the child to read."""
        changes = [encode_change(change) for change in self.changes]  # `asdict` would forget their classes
        path.write_text(json.dumps({**asdict(self), "changes": changes}), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Reads what `write` wrote."""
        fields = tuples(json.loads(path.read_text(encoding="utf-8")))
        changes = tuple(map(decode_change, fields.pop("changes")))
        return cls(**{**fields, "command": Command(**fields["command"]), "changes": changes})


def tuples(value: Any) -> Any:
    """Returns a JSON value with tuples in place of lists, as the fields of records are."""
    if isinstance(value, dict):
        return {key: tuples(member) for key, member in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value
