"""Launchers such as torchrun: what they tell the processes that they start, and what these left, one folder for each.

Every Python under a launcher is entered and has a folder; ranks, which train, write a closing record there. No torch.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaverify.errors import ProblemError, SpecError

JOB = "GAVERIFY_AUDIT_JOB"
"""The variable that tells a process started by a launcher where its job is described."""

_HERE = "127.0.0.1"
_PORTS, _TRIES = range(10_000, 32_768), 64
_ENTRANCE = str(Path(__file__).with_name("entrance"))  # holds nothing but `sitecustomize.py`


def launched(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """Returns the variables that torchrun gives to a process of one machine; gloo is kept on the loopback.

    Args:
        rank: From 0.
        ranks: How many processes there are.
        port: Where rank 0 listens.
    """
    known = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": _HERE,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in known.items()} | {
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
    found = shutil.which(word, path=os.pathsep.join(folders))
    if found is None:
        raise SpecError(
            f"{option}: there is no program `{word}`; write the command as in a shell, such as "
            f'{option} "torchrun --nproc-per-node 2"'
        )
    return found


ERROR, INTERNAL, RANK, META = "error.txt", "internal.txt", "rank.txt", "meta.json"
"""What a process leaves in its folder: why it failed, a fault of the recorder's, its rank then, its closing record."""

_PROCESSES = "processes"


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
    found = [(meta_of(folder), folder) for folder in folders_of(run) if (folder / META).exists()]
    most = max((meta["ranks"] for meta, _ in found), default=1)
    trained = [(meta["rank"], folder) for meta, folder in found if meta["ranks"] == most]
    return [folder for _, folder in sorted(trained)]


def is_whole(run: Path) -> bool:
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
    return [(meta_of(folder)["rank"], meta_of(folder)["updates"]) for folder in ranks_of(run) if not is_whole(run)]
