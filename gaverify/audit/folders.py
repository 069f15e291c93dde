"""The folder that a process of an audit leaves: its files, its closing record, and why it failed. No torch.

Every Python under a launcher has a folder of its own inside the run's; ranks, which train, write a closing record.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from pathlib import Path

from gaverify.errors import explain_users_fault, is_out_of_space
from gaverify.records.events import ClosingRecord, read_closing_record

COMPILED = "compiled graph"
"""Stands among the kernels that draw out of sight; the runs are then made without compilation."""

DISK_FULL = 97
"""Exit status of a child that could not write what it recorded."""

RECORDER_FAILED = 98
"""Exit status of a child whose recorder failed: a fault in gaverify."""

SCRIPT_FAILED = 96
"""Exit status of a child whose script raised."""

ERROR, INTERNAL, RANK, META, LOG = "error.txt", "internal.txt", "rank.txt", "meta.json", "log.txt"
"""Files of a process: its script's error, a fault of the recorder, its rank, its closing record, what it printed."""

ROOM = "room.json"
"""Holds the bytes that a run would store, and those that are free, where these are fewer."""

COPY = "copy"
"""Begins the names of files with whole gradients, by which later runs make the same steps."""

_LOW = 1 << 20  # less room than this: a failed write was a full disk

_PROCESSES = "processes"


def note_fault(error: BaseException, folder: Path) -> int:
    """Notes in a process's folder why its recorder failed; returns the exit status that says so.

    Neither a full disk nor a descriptor that the script has closed is a fault of gaverify's. A disk without room for a
    text may have some for an empty file. By that file the parent knows of a process that a launcher started.
    """
    full = is_out_of_space(error) or is_full(folder)
    users_fault = explain_users_fault(error)
    if not full:
        try:
            if users_fault:
                (folder / ERROR).write_text(users_fault, encoding="utf-8")
                return SCRIPT_FAILED
            (folder / INTERNAL).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        except OSError as broken:
            full = is_out_of_space(broken)
    if not full:
        return RECORDER_FAILED
    with contextlib.suppress(OSError):
        # A text that was written in part would be taken for a fault of the recorder; its room serves the empty file.
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


def note_rank(folder: Path, rank: int, ranks: int) -> None:
    """Notes which rank a process is, for what is said of it; nothing where it is alone."""
    if ranks > 1:
        (folder / RANK).write_text(f"{rank} of {ranks}", encoding="ascii")


def rank_of(folder: Path) -> str:
    """Returns the rank of a process as `1 of 2`; empty where it is alone, or not known as a rank."""
    return (folder / RANK).read_text(encoding="ascii") if (folder / RANK).exists() else ""


def folders_of(run: Path) -> list[Path]:
    """Returns the folders of all processes of a run; its own where no launcher started it."""
    if not (run / _PROCESSES).is_dir():
        return [run]
    return sorted(entry for entry in (run / _PROCESSES).iterdir() if entry.is_dir())


def closing_record_of(folder: Path) -> ClosingRecord:
    """Returns the closing record of a process."""
    return read_closing_record((folder / META).read_text(encoding="utf-8"))


def ranks_of(run: Path) -> list[Path]:
    """Returns the folders of the processes that trained together and have written their closing record, by rank.

    A process that stepped alone beside them, such as a parent that trains a tokenizer, is none of them.
    """
    records = [(closing_record_of(folder), folder) for folder in folders_of(run) if (folder / META).exists()]
    most = max((record.ranks for record, _ in records), default=1)
    trained = [(record.rank, folder) for record, folder in records if record.ranks == most]
    return [folder for _, folder in sorted(trained)]


def has_all_records(run: Path) -> bool:
    """Whether every rank of a run has written its closing record; without a launcher, whether the process has."""
    if folders_of(run) == [run]:
        return (run / META).exists()
    ranks = ranks_of(run)
    # Ranks that join no process group each train alone, and know of no other.
    started_ranks = sum((folder / RANK).exists() for folder in folders_of(run))
    return bool(ranks) and len(ranks) >= max(started_ranks, closing_record_of(ranks[0]).ranks)


def failed_first(run: Path) -> Path | None:
    """Returns the folder of the process that failed first; None where none said so."""
    failed = [folder for folder in folders_of(run) if (folder / ERROR).exists()]
    return min(failed, key=lambda folder: (folder / ERROR).stat().st_mtime_ns, default=None)


def rank_that_failed(run: Path, patience: float) -> bool:
    """Whether a rank failed longer than `patience` seconds ago: what waits for it waits for ever."""
    now = time.time()
    errors = [folder / ERROR for folder in folders_of(run) if (folder / RANK).exists()]
    # Within that time the launcher may end the other ranks itself.
    return any(error.exists() and now - error.stat().st_mtime > patience for error in errors)


def remove_copies(run: Path) -> None:
    """Removes the whole gradients of a run whose steps no run will make any more."""
    for copy in run.rglob(f"{COPY}-*.pt"):
        copy.unlink(missing_ok=True)


def updates_of(folder: Path) -> int:
    """Returns how many updates a process has made so far."""
    return len(list(folder.glob("rows-*.pt")))


def ended_early(run: Path) -> list[tuple[int, int]]:
    """Returns rank and updates of the processes that came to their end, where others of their group did not."""
    ranks = ranks_of(run)
    # A rank of gaverify's own launcher leaves a closing record where its script failed, too.
    ended = [closing_record_of(folder) for folder in ranks if not (folder / ERROR).exists()]
    if has_all_records(run) and len(ended) == len(ranks):
        return []
    return [(record.rank, record.updates) for record in ended]
