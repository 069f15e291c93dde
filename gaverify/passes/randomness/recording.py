"""Records the random draws of the full batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gaverify.passes.randomness.contents import fingerprint
from gaverify.passes.randomness.draws import Draw, DrawRecord
from gaverify.passes.randomness.foreign import recorded, states, watched
from gaverify.passes.randomness.operations import (
    MASKED,
    arguments_of,
    drawn_by,
    draws_unseen,
    generator_key,
    kept_source,
    name_of,
    source_of,
)
from gaverify.passes.randomness.sites import call_site
from gaverify.tracebacks import hands_over


class Recorder:
    """Handles the random operations of the full batch: keeps each result."""

    def __init__(self, batch_size: int) -> None:
        self.record = DrawRecord()
        self._size = batch_size
        self._seen: dict[Any, torch.Size] = {}  # by the generator's state before the draw: what shape was drawn

    @hands_over
    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: torch.Tensor | None = None
    ) -> Any:
        """Runs the operation and keeps what it drew; `like` is what the tensor that is drawn into was made after."""
        operation = name_of(func)
        before = generator_key(args, kwargs)
        source = kept_source(func, source_of(func, args, like))
        result = func(*args, **kwargs)
        drawn = drawn_by(operation, args, result)
        if drawn is None:
            if generator_key(args, kwargs) != before or draws_unseen(func, args, kwargs):
                self.record.fused.add(operation)
            return result
        if self._seen.get(before) == drawn.shape or (generator_key(args, kwargs) == before and drawn.numel() > 0):
            return result
        self._seen[before] = drawn.shape
        self.record.draws.append(_keep(operation, drawn, args, source))
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps Python's and NumPy's draws, and where the pass leaves their generators."""
        with watched(recorded(self.record.foreign)):
            yield
        if self.record.foreign:
            self.record.foreign_end = states()


def _keep(operation: str, drawn: torch.Tensor, args: tuple[Any, ...], source: torch.Tensor | None) -> Draw:
    value = drawn.detach()
    value = value.to(torch.bool) if operation.startswith("bernoulli") or operation in MASKED else value.clone()
    value = value.clone() if value is drawn else value
    shape = tuple(source.shape) if source is not None else None
    prints = fingerprint(source) if source is not None and source.shape == drawn.shape else None
    return Draw(operation, value, arguments_of(operation, args), shape, prints, call_site())
