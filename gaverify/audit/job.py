"""What a child process is told, by gaverify or through a launcher such as torchrun, and the folder that it leaves.

A job is the script, its arguments and the part it plays, as plain JSON. Every Python under a launcher is entered and
has a folder; ranks, which train, write a closing record there. No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gaverify.errors import ProblemError, SpecError, is_out_of_space
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

COMPILED = "compiled graph"
"""Stands among the kernels that draw out of sight; the runs are then made without compilation."""

DISK_FULL = 97
"""Exit status of a child that could not write what it recorded."""

RECORDER_FAILED = 98
"""Exit status of a child whose recorder failed: a fault in gaverify."""

SCRIPT_FAILED = 96
"""Exit status of a child whose script raised."""

EVERYTHING = "*"
"""Stands for all values of modules that a run puts back."""

SCRIPT = "(script)"
"""Stands for the script's own code among the paths of modules."""


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


JOB = "GAVERIFY_AUDIT_JOB"
"""The variable that tells a process started by a launcher where its job is described."""

_HERE = "127.0.0.1"
_PORTS, _TRIES = range(10_000, 32_768), 64
_ENTRANCE = str(Path(__file__).with_name("entrance"))  # holds nothing but `sitecustomize.py`


def torchrun_variables(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """Returns the variables that torchrun gives to a process of one machine; gloo is kept on the loopback.

    Args:
        rank: From 0.
        ranks: How many processes there are.
        port: Where rank 0 listens.
    """
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": _HERE,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()} | {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    }


def free_port() -> int:
    """Returns a port of the loopback that nobody listens on now.

    Ports that the system hands out (32768 and above) are left alone: until rank 0 listens it has time to give one of
    them to another process. Which one it is hangs on no seed of the script's.
    """
    for _ in range(_TRIES):
        port = _PORTS.start + secrets.randbelow(len(_PORTS))
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind((_HERE, port))
            return port
    raise ProblemError(f"none of {_TRIES} ports of {_HERE} that were tried is free: end what listens on them")


def entering(job: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which every Python that a launcher starts enters the recorder.

    Args:
        job: Where the job is described.
        environment: The variables of the launcher without them.
    """
    path = environment.get("PYTHONPATH")
    return {JOB: str(job), "PYTHONPATH": _ENTRANCE + (os.pathsep + path if path else "")}


def program(word: str, option: str = "--launcher") -> str:
    """Returns the path of a launcher: one installed beside this Python comes first, `python` is this Python.

    Args:
        word: Its name.
        option: Where the user wrote it.

    Raises:
        SpecError: There is none of this name.
    """
    if word in ("python", "python3"):
        return sys.executable
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    path = shutil.which(word, path=os.pathsep.join(folders))
    if path is None:
        raise SpecError(
            f"{option}: there is no program `{word}`; write the command as in a shell, such as "
            f'{option} "torchrun --nproc-per-node 2"'
        )
    return path


ERROR, INTERNAL, RANK, META = "error.txt", "internal.txt", "rank.txt", "meta.json"
"""What a process leaves in its folder: why it failed, a fault of the recorder's, its rank then, its closing record."""

ROOM = "room.json"
"""Holds the bytes that a run would store, and those that are free, where these are fewer."""

_LOW = 1 << 20  # less room than this: a failed write was a full disk

_PROCESSES = "processes"


def note_fault(error: BaseException, folder: Path) -> int:
    """Notes in a process's folder why its recorder failed; returns the exit status that says so.

    A full disk is no fault of gaverify's. Where it has no room for a text it may have some for an empty file, by which
    the parent knows of a process that a launcher started.
    """
    full = is_out_of_space(error) or is_full(folder)
    if not full:
        try:
            (folder / INTERNAL).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        except OSError as broken:
            full = is_out_of_space(broken)
    if not full:
        return RECORDER_FAILED
    with contextlib.suppress(OSError):
        (folder / INTERNAL).unlink(missing_ok=True)
        (folder / ROOM).touch()
    return DISK_FULL


def is_full(folder: Path) -> bool:
    """Whether a folder's disk has no room for another file."""
    try:
        room = os.statvfs(folder)
    except (OSError, AttributeError):  # Windows has no such call
        return False
    return room.f_bavail * room.f_frsize < _LOW or (room.f_files > 0 and room.f_favail == 0)


def folder_for(run: Path, process: int) -> Path:
    """Makes and returns the folder of a process of a run."""
    folder = run / _PROCESSES / f"{process}-{time.time_ns()}"
    folder.mkdir(parents=True)
    return folder


def folders_of(run: Path) -> list[Path]:
    """Returns the folders of all processes of a run; its own where no launcher started it."""
    if not (run / _PROCESSES).is_dir():
        return [run]
    return sorted(entry for entry in (run / _PROCESSES).iterdir() if entry.is_dir())


def meta_of(folder: Path) -> dict[str, Any]:
    """Returns the closing record of a process."""
    return json.loads((folder / META).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def ranks_of(run: Path) -> list[Path]:
    """Returns the folders of the processes that trained together and have written their closing record, by rank.

    A process that stepped alone beside them, such as a parent that trains a tokenizer, is none of them.
    """
    records = [(meta_of(folder), folder) for folder in folders_of(run) if (folder / META).exists()]
    most = max((meta["ranks"] for meta, _ in records), default=1)
    trained = [(meta["rank"], folder) for meta, folder in records if meta["ranks"] == most]
    return [folder for _, folder in sorted(trained)]


def has_all_records(run: Path) -> bool:
    """Whether every rank of a run has written its closing record; without a launcher, whether the process has."""
    if folders_of(run) == [run]:
        return (run / META).exists()
    ranks = ranks_of(run)
    return bool(ranks) and len(ranks) >= meta_of(ranks[0])["ranks"]


def failed_first(run: Path) -> Path | None:
    """Returns the folder of the process that failed first; None where none said so."""
    failed = [folder for folder in folders_of(run) if (folder / ERROR).exists()]
    return min(failed, key=lambda folder: (folder / ERROR).stat().st_mtime_ns, default=None)


def rank_that_failed(run: Path, patience: float) -> bool:
    """Whether a rank failed longer than `patience` seconds ago: what waits for it waits for ever."""
    now = time.time()
    marks = [folder / RANK for folder in folders_of(run)]
    return any(mark.exists() and now - mark.stat().st_mtime > patience for mark in marks)


def updates_of(folder: Path) -> int:
    """Returns how many updates a process has made so far."""
    return len(list(folder.glob("rows-*.pt")))


def ended_early(run: Path) -> list[tuple[int, int]]:
    """Returns rank and updates of the processes that came to their end, where others of their group did not."""
    return [
        (meta_of(folder)["rank"], meta_of(folder)["updates"]) for folder in ranks_of(run) if not has_all_records(run)
    ]
