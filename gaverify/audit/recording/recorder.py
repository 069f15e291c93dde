"""Records what a training script does, call by call, and what its optimizers are given.

The script's own code runs between the two halves of each method here; nothing of it is changed: generators, gradients,
weights (but in the runs that move or hold them on purpose) and exceptions pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gaverify.audit.recording.averages import Average
from gaverify.audit.recording.passes import Passes
from gaverify.audit.recording.values import plain
from gaverify.records.events import Kind
from gaverify.tracebacks import user_place


class Recorder(Passes):
    """All calls of the script, each with what is noted before and after it."""

    @contextmanager
    def zero_grad(self) -> Iterator[None]:
        """Surrounds a call of `zero_grad`, of an optimizer or a module."""
        with self._work():
            self._settle_by_hand()
            self._changes.note(self.watch.look(), "backward" if self._in_backward else "between")
        yield
        with self._work():
            cleared = self.watch.look().cleared
            self.watch.forget(cleared)
            self._event("zero_grad", cleared=cleared)

    @contextmanager
    def clip(self, call: str, limit: float | None, norm: Any = None) -> Iterator[Callable[[Any], None]]:
        """Surrounds gradient clipping; gives a function that is to be called with its result, the norm.

        Args:
            call: What was called.
            limit: The largest norm, or value, that it lets through; None where it is not known.
            norm: What stands for the result where that is None.
        """
        result: list[Any] = []
        with self._work():
            seen = self.watch.look()
            self._changes.note(seen, "between")
            for entry in self.watch.entries():
                if entry.summed is not None and not entry.clipped and entry.index in seen.changed:
                    entry.keep()
        yield result.append
        with self._work():
            changed = self.watch.look().changed
            for index in changed:
                self.watch.of(index).clipped = True
            norm = next((output for output in result if output is not None), norm)
            norm = float(norm) if isinstance(norm, torch.Tensor) else norm
            self._event("clip", call=call, active=bool(changed), optimizers=sorted(changed), norm=norm, limit=limit)
            self._keep_used()

    def unscaled(self) -> None:
        """After a `GradScaler` took its scale out of the gradients: they are kept as they are without it."""
        with self._work():
            for index in self.watch.look().changed:
                entry = self.watch.of(index)
                if entry.summed is not None and not entry.clipped:
                    entry.keep()

    @contextmanager
    def scaler(self, call: str) -> Iterator[None]:
        """Surrounds a call of a `GradScaler`."""
        with self._work():
            self._changes.note(self.watch.look(), "between")
            before, place = self.steps, user_place()
        yield
        with self._work():
            self.watch.look()
            skipped = call == "step" and self.steps == before
            self._event("scaler", place, call=call, skipped=skipped)
            if skipped:
                self.watch.forget(range(len(self.watch)))

    @contextmanager
    def average(self, average: nn.Module, model: nn.Module) -> Iterator[None]:
        """Surrounds an update of an averaged copy of a model."""
        with self._work():
            update = Average(average, model)
        yield
        with self._work():
            self._event("average", **update.decay())
            self._averages.forget()

    def simple(self, kind: Kind, **values: Any) -> None:
        """Notes a call that needs nothing measured."""
        with self._work():
            self._event(kind, **values)
            if kind == "scheduler":
                self._changes.know_settings()

    def targets(self, valid: torch.Tensor, total: int) -> None:
        """Notes how many targets of a loss count; read at the next backward."""
        if not self.off and torch.is_grad_enabled() and plain(valid) is not None:
            self._targets.append((valid, total))

    def gathered(self) -> None:
        """Notes that a tensor that needs a gradient is gathered from all ranks; read at the next backward."""
        if not self.off:
            self._gathers.append(user_place())
