"""What happens in a process that a launcher started, as soon as it has imported torch: the recorder installs itself.

The process may be a rank, or the launcher's own agent, a parent of ranks, a worker of a data loader: all are recorded
alike, and only those that step leave a closing record.
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from gaverify.audit.child import give_up, installed, is_ours, keep_under_guard, seed, trimmed
from gaverify.audit.job import RECORDER_FAILED, Job
from gaverify.audit.members import ERROR, RANK, folder_for
from gaverify.audit.recording.ranks import place_in_group
from gaverify.audit.recording.recorder import Recorder
from gaverify.children.output import cause_of
from gaverify.records.events import Ending


def enter(path: str) -> None:
    """Records this process from here on.

    Args:
        path: The job of the run that it is a part of.
    """
    whole = Job.read(Path(path))
    folder = folder_for(Path(whole.folder), os.getpid())
    job = replace(whole, folder=str(folder))
    try:
        if job.files == "guard":
            keep_under_guard(job, folder)
        recorder = installed(job, folder)
        seed(job)
    except BaseException:
        give_up(folder)
    _tell_of_failures(folder)
    atexit.register(_closed, recorder, os.getpid())


def _tell_of_failures(folder: Path) -> None:
    original, process = sys.excepthook, os.getpid()

    def told(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if os.getpid() == process and not isinstance(error, KeyboardInterrupt):
            if is_ours(error):
                give_up(folder)
            text = f"{cause_of(error)}\n{trimmed(error)}"
            (folder / ERROR).write_text(text, encoding="utf-8", errors="replace")
            rank, ranks = place_in_group()
            if ranks > 1:
                (folder / RANK).write_text(str(rank), encoding="ascii")
        original(kind, error, frames)

    sys.excepthook = told


def _closed(recorder: Recorder, process: int) -> None:
    """Writes the closing record of a process that ends before all updates are made; its exit status stays its own."""
    if os.getpid() == process and recorder.steps and not (Path(recorder.job.folder) / ERROR).exists():
        try:
            recorder.close(Ending.SCRIPT)
        except Exception:
            os._exit(RECORDER_FAILED)
