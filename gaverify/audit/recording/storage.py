"""What a recorded run leaves on disk: events line by line, gradients and samples once per update."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from gaverify.audit.job import DISK_FULL, RECORDER_FAILED, ROOM
from gaverify.records.events import Event

_LOW = 1 << 20  # less room than this: a failed write was a full disk


class Storage:
    """Writes into the folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events = (folder / "events.jsonl").open("w", encoding="utf-8")
        self.process = os.getpid()

    def event(self, event: Event) -> None:
        """Appends an event."""
        self._events.write(json.dumps({**vars(event), "values": dict(event.values)}) + "\n")

    def reserve(self, tensors: Iterable[torch.Tensor], times: int) -> None:
        """Ends the process where the disk cannot take what will be stored, long before it is full.

        Args:
            tensors: What one update stores.
            times: How often it is stored, by this process and by other ranks.
        """
        wanted = times * sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:  # then the disk tells when it is full
            return
        if wanted > free:
            (self.folder / ROOM).write_text(json.dumps([wanted, free]), encoding="utf-8")
            leave(DISK_FULL)

    def tensors(self, name: str, content: Any) -> None:
        """Writes tensors as one file, streamed from where they lie."""
        torch.save(content, self.folder / f"{name}.pt")
        self._events.flush()

    def finish(self, meta: Mapping[str, Any]) -> None:
        """Writes the closing record; only a run that has one is complete.

        Its name appears when it is whole: the parent looks for those of the ranks while they write them.
        """
        self._events.flush()
        unfinished = self.folder / "meta.unfinished"
        unfinished.write_text(json.dumps(meta), encoding="utf-8")
        unfinished.replace(self.folder / "meta.json")

    def give_up(self, error: BaseException) -> NoReturn:
        """Ends the process because the recorder failed: a full disk, or a fault in gaverify."""
        full = _could_not_write(error)
        if not full:
            try:
                full = shutil.disk_usage(self.folder).free < _LOW
            except OSError:
                full = True
        if not full:
            (self.folder / "internal.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        leave(DISK_FULL if full else RECORDER_FAILED)


def _could_not_write(error: BaseException | None) -> bool:
    """Whether a full disk, a quota or a limit of file sizes is behind an error; torch's writer has no errno."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if isinstance(error, RuntimeError) and "iostream error" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave(status: int) -> NoReturn:
    """Ends this process now: no handler, thread or worker of the script can hold it up."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
