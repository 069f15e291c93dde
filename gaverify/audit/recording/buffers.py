"""Buffers of the full-batch run, put in place in the runs that are led along it, as its weights are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from gaverify.audit.recording.keeping import copied
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.values import plain


class Buffers:
    """Keeps what a step leaves in the buffers of the script's models, or puts the full-batch run's there.

    Running statistics, queues and power iterations go on after each micro-batch, so that a later update would start
    from other buffers than the full batch's and be judged for what an earlier one did.

    Args:
        source: The folder of the full-batch run; None where this is that run.
    """

    def __init__(self, source: Path | None) -> None:
        self._source = source
        self._known: dict[str, torch.Tensor | None] = {}  # as they were when they were last seen

    def know(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Takes buffers as they are before the first forward: what never changes is not written."""
        for name, buffer in buffers.items():
            if name not in self._known:
                self._known[name] = copied(buffer)

    def keep(self, storage: Storage, step: str, buffers: Mapping[str, torch.Tensor]) -> None:
        """Writes the buffers that have changed since they were last written."""
        readable = {name: value for name, buffer in buffers.items() if (value := plain(buffer)) is not None}
        changed = {name: value for name, value in readable.items() if self._changed(name, value)}
        if changed:
            storage.tensors(f"buffers-{step}", changed)
        self._known |= {name: copied(value) for name, value in changed.items()}

    def put(self, step: str, buffers: Mapping[str, torch.Tensor]) -> None:
        """Puts in place what the full-batch run's buffers were after the same step."""
        path = self._source / f"buffers-{step}.pt" if self._source is not None else None
        if path is None or not path.exists():
            return
        for name, value in torch.load(path, map_location="cpu", mmap=True, weights_only=True).items():
            own = plain(buffers[name]) if name in buffers else None
            if own is not None and own.shape == value.shape and own.dtype is value.dtype:
                own.copy_(value)

    def _changed(self, name: str, value: torch.Tensor) -> bool:
        before = self._known.get(name)
        if before is None or before.shape != value.shape or before.dtype is not value.dtype:
            return True
        return not torch.equal(value, before)
