"""Follows the calls of a script in this process, as a recorded run does in its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from gaverify.audit.job import Command, Job
from gaverify.audit.recording.bus import Guard
from gaverify.audit.recording.calls import Recording
from gaverify.audit.recording.storage import Journal, Storage


@contextmanager
def following(kind: Any, *args: Any) -> Iterator[Any]:
    """Calls of a kind in the last recorded update; undoes what following leaves in a process that is no script's."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "from_numpy"), (torch, "frombuffer"), (torch.autograd, "_engine_run_backward")):
            patch.setattr(owner, name, getattr(owner, name))
        storage = Storage(Path(folder))
        recording = Recording(Job(Command(""), "full", 1, folder=folder), storage, Guard(storage), Journal(storage))
        calls = kind(recording, *args)
        try:
            yield calls
        finally:
            calls.mode.__exit__(None, None, None)
