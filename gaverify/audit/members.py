"""The processes that a launcher started, by the folders that they left: which are ranks, and which one failed first.

Every Python under a launcher is entered and has a folder; those that train write a closing record there. No torch.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

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
