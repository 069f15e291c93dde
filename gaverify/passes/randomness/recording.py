"""Records the random draws of the full batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gaverify.passes.randomness.contents import fingerprint, tolerance
from gaverify.passes.randomness.draws import Draw, DrawRecord
from gaverify.passes.randomness.foreign import recorded, states, watched
from gaverify.passes.randomness.operations import Drawing, draws_unseen
from gaverify.passes.randomness.sites import call_site
from gaverify.tracebacks import hands_over


class Recorder:
    """Handles the random operations of the full batch: keeps each result."""

    def __init__(self) -> None:
        self.record = DrawRecord()
        self.known: dict[Any, torch.Size] = {}  # by the generator's state before the draw: what shape was drawn

    @hands_over
    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: torch.Tensor | None = None
    ) -> Any:
        """Runs the operation and keeps what it drew; `like` is what the tensor that is drawn into was made after."""
        run = Drawing(func, args, kwargs, like)
        if run.drawn is None:
            if run.moved or draws_unseen(func, args, kwargs):
                self.record.fused.add(run.operation)
        elif self.known.get(run.before) != run.drawn.shape and (run.moved or run.drawn.numel() == 0):
            self.known[run.before] = run.drawn.shape
            shape = tuple(run.source.shape) if run.source is not None else None
            prints = fingerprint(run.source) if run.source is not None and shape == run.drawn.shape else None
            least = tolerance(run.source) if run.source is not None else 0.0
            value = run.drawn.detach().to(torch.bool if run.kind.mask else run.drawn.dtype, copy=True)
            draw = Draw(run.operation, value, run.kind.asked(args), shape, prints, least, call_site())
            self.record.draws.append(draw)
        return run.result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps Python's and NumPy's draws, and where the pass leaves their generators."""
        with watched(recorded(self.record.foreign)):
            yield
        if self.record.foreign:
            self.record.foreign_end = states()
