"""Draws of a script's loop, outside the model's forwards: kept in the full-batch run, dealt out in the others."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gaverify.audit.recording.places import user_place
from gaverify.audit.recording.ranks import place_in_group
from gaverify.audit.replay.dealing import Counterparts, Kept, Part, Share, Unalignable
from gaverify.audit.replay.sites import site
from gaverify.passes.randomness import draw_mode, foreign
from gaverify.passes.randomness.operations import Drawing

_ORDERS = ("randperm", "permutation", "shuffle")
"""What draws an order of the batch, of which some of its samples have no part of their own."""
_FILE = "loop.pt"
_LARGEST = 1 << 28  # elements of a draw that is kept: more is no noise for a batch


class LoopDraws:
    """What is common to both sides: the loop is listened to between the calls that the recorder sees.

    Nothing is heard before the first optimizer is made: weights and data sets are drawn before, and alike in all runs.
    """

    def __init__(self) -> None:
        self.steps = self.backwards = 0
        self.unaligned: dict[str, str] = {}
        self.moved = True
        self.count = 0  # draws that were kept, or given the full-batch run's
        self._mode = draw_mode(self._operation)
        self._paused = 0
        self._process = os.getpid()
        self._foreign: AbstractContextManager[None] | None = None

    def start(self) -> None:
        """Starts to listen, for good."""
        if self._foreign is None:
            self._foreign = foreign.watched(self._call)
            self._foreign.__enter__()
            self._mode.__enter__()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds what is not the loop's own: a forward, a backward, a step, a loader."""
        off = self._foreign is not None and not self._paused and _get_current_dispatch_mode() is self._mode
        self._paused += 1
        if off:  # off the stack altogether: a compiled forward does not run under a mode
            self._mode.__exit__(None, None, None)
        try:
            yield
        finally:
            if off:
                self._mode.__enter__()
            self._paused -= 1

    def after_backward(self) -> None:
        """A backward pass is over."""
        self.backwards += 1

    def after_step(self) -> None:
        """An optimizer has stepped."""
        self.steps += 1

    def forward(self, rows: int | None) -> None:
        """A forward of so many rows begins."""

    def close(self) -> None:
        """The run is over."""

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._paused or os.getpid() != self._process or _sets_weights(args):
            return func(*args, **kwargs)
        run = Drawing(func, args, kwargs)
        drawn = run.drawn
        if drawn is not None and (drawn.is_meta or type(drawn) is not torch.Tensor):
            return run.result
        if drawn is None or drawn.numel() > _LARGEST:
            self.unaligned.setdefault(run.operation, "drawn in the loop, out of sight")
            return run.result
        value = self._dealt(run.operation, drawn)
        return run.result if value is None else run.replaced(drawn, value)

    def _dealt(self, operation: str, drawn: torch.Tensor) -> torch.Tensor | None:
        raise NotImplementedError

    def _call(self, call: foreign.Call) -> Any:
        result = call.run()
        return result if self._paused or os.getpid() != self._process else self._made(call, result)

    def _made(self, call: foreign.Call, result: Any) -> Any:
        raise NotImplementedError


class KeptLoopDraws(LoopDraws):
    """The full-batch run: everything that its loop draws is written when it ends.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._draws: list[Kept] = []
        self._rows: dict[int, int] = {}

    def forward(self, rows: int | None) -> None:
        """Notes the rows of a forward."""
        self._rows.setdefault(self.backwards, rows or 0)

    def close(self) -> None:
        """Writes the draws."""
        torch.save((self._draws, self._rows), self._folder / _FILE)

    def _dealt(self, operation: str, drawn: torch.Tensor) -> torch.Tensor | None:
        self._keep(operation, tuple(drawn.shape), drawn.detach().to("cpu", copy=True))
        return None

    def _made(self, call: foreign.Call, result: Any) -> Any:
        value = list(call.args[0]) if _in_place(call, result) else copy.copy(result)
        try:
            pickle.dumps(value)
        except Exception:
            return result
        self._keep(f"{call.module}.{call.name}", _shape(result), value)
        return result

    def _keep(self, operation: str, shape: tuple[int, ...], value: Any) -> None:
        self.count += 1
        self._draws.append(Kept(site(), self.steps, self.backwards, operation, shape, value))


class DealtLoopDraws(LoopDraws):
    """The other runs: each draw becomes the rows of the same samples in the full-batch run's.

    Args:
        source: Folder of the full-batch run.
        parts: Micro-batches per batch of the full-batch run; 0 where that is not known.
        turns: Whether the ranks, where there are several, take turns row by row.
    """

    def __init__(self, source: Path, parts: int, turns: bool = False) -> None:
        super().__init__()
        self._turns = turns
        draws, rows = torch.load(source / _FILE, weights_only=False) if (source / _FILE).exists() else ([], {})
        self._counterparts = Counterparts(draws, rows, parts)

    def _dealt(self, operation: str, drawn: torch.Tensor) -> torch.Tensor | None:
        part = self._part(operation, tuple(drawn.shape))
        if part is None:
            return None
        value = part.draw.value
        if part.dim >= 0:
            value = value.index_select(part.dim, torch.tensor(part.rows, device=value.device))
        return value.to(drawn.device, drawn.dtype)  # type: ignore[no-any-return]

    def _made(self, call: foreign.Call, result: Any) -> Any:
        operation = f"{call.module}.{call.name}"
        part = self._part(operation, _shape(result))
        if part is None:
            return result
        value = part.draw.value
        if _in_place(call, result):
            if len(call.args[0]) == len(value):
                call.args[0][:] = value
            else:
                self._lose(operation, "the full-batch run shuffled something else")
            return result
        if part.dim < 0:
            return copy.copy(value)
        return [value[at] for at in part.rows] if isinstance(value, list) else value.take(part.rows, part.dim)

    def _part(self, operation: str, shape: tuple[int, ...]) -> Part | None:
        if self.steps >= self._counterparts.steps:
            return None  # behind what the full-batch run recorded
        try:
            share = Share(*place_in_group(), self._turns)
            part = self._counterparts.find(site(), self.steps, operation, shape, share)
            if part.dim >= 0 and operation.rpartition(".")[2] in _ORDERS:
                raise Unalignable("an order of the whole batch has no part for some of its samples")
        except Unalignable as error:
            self._lose(operation, str(error))
            return None
        self.count += 1
        return part

    def _lose(self, operation: str, why: str) -> None:
        name = f"{operation} in the loop"
        place = user_place()
        if name not in self.unaligned and place is not None:
            why = f"{why} ({place[0]}:{place[1]})"
        self.unaligned.setdefault(name, why)


def _shape(result: Any) -> tuple[int, ...]:
    return (len(result),) if isinstance(result, list) else tuple(getattr(result, "shape", ()))


def _in_place(call: foreign.Call, result: Any) -> bool:
    """Whether a call has put a list in another order."""
    return result is None and bool(call.args) and isinstance(call.args[0], list)


def _sets_weights(args: tuple[Any, ...]) -> bool:
    """Whether a draw goes into a parameter: weights are made, no sample is."""
    return (
        bool(args)
        and isinstance(args[0], torch.Tensor)
        and (isinstance(args[0], torch.nn.Parameter) or args[0].requires_grad)
    )
