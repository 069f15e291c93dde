"""Random draws of a script's forwards: kept in the full-batch run, dealt out per sample in the accumulated one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gaverify.audit.folders import COMPILED
from gaverify.audit.same_data import ForwardInputs, Matcher, read_rows
from gaverify.passes.isolation.globals import torch_generator_states
from gaverify.passes.layouts import SampleLayout
from gaverify.passes.precision import Arithmetic
from gaverify.passes.randomness import Dealer, Dealing, Draw, DrawLedger, DrawRecorder, Recomputing, draw_mode
from gaverify.records.events import DrawSummary

Shapes = list[tuple[int, ...]]
Key = tuple[int, bool, int]
"""A model, whether it is in training mode, and how many inputs it is given."""


class ForwardDraws:
    """The treatment of the random draws of a run's forwards: none, unless its role asks for more.

    Args:
        arithmetic: The arithmetic of the script.
    """

    is_eager = False
    """Whether modules that look compiled run as they are written."""
    deals_loop_draws = False
    """Whether draws outside the forwards are dealt out as well."""
    repeats_first_update = False
    """Whether all updates get the draws of the full batch's first."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._handlers: list[DrawRecorder | Dealer] = []  # of the window's forwards
        self._handler: DrawRecorder | Dealer | None = None
        self._fused: set[str] = set()
        self._count = self._dealt = 0
        self._unaligned: dict[str, str] = {}

    def begin(self, key: Key, shapes: Shapes, prints: ForwardInputs) -> None:
        """Prepares for the next forward, known by its key, and by the shapes and fingerprints of its inputs."""
        self._handler = self._next(key, shapes, prints)
        if self._handler is not None:
            self._handlers.append(self._handler)

    def _next(self, key: Key, shapes: Shapes, prints: ForwardInputs) -> DrawRecorder | Dealer | None:
        return None

    def in_forward(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Returns what to run a forward in; compiled graphs do not run under a mode, their draws stay their own."""
        compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if self._handler is None or (compiled and not self.is_eager):
            return nullcontext()
        return draw_mode(self._handler, self._arithmetic, self._handler.packed)

    def in_backward(self) -> AbstractContextManager[Any]:
        """Returns what to run a backward in: checkpointing draws again there."""
        return draw_mode(Recomputing(self._handlers), self._arithmetic) if self._handlers else nullcontext()

    def leave_forward(self) -> None:
        """A forward is over: what is drawn from here to its backward is not the model's."""

    def enter_backward(self) -> None:
        """A backward begins."""

    def close(self, update: int) -> None:
        """Ends an update."""
        self._handlers = []

    def summarise(self) -> DrawSummary:
        """Returns what came of it, for the closing record."""
        return DrawSummary(self._count, self._dealt, self._unaligned, tuple(sorted(self._fused)))


class KeptDraws(ForwardDraws):
    """The full-batch run: one `DrawRecorder` per forward, written when the update is over.

    Args:
        arithmetic: The arithmetic of the script.
        folder: Where it writes.
    """

    def __init__(self, arithmetic: Arithmetic, folder: Path) -> None:
        super().__init__(arithmetic)
        self._folder = folder
        self._forwards: list[tuple[Key, Shapes, DrawRecorder]] = []

    def _next(self, key: Key, shapes: Shapes, prints: ForwardInputs) -> DrawRecorder:
        recorder = DrawRecorder()
        self._forwards.append((key, shapes, recorder))
        return recorder

    @contextmanager
    def in_forward(self, module: nn.Module) -> Iterator[None]:
        """Runs a forward; notes when it drew out of sight, as a compiled graph does."""
        before = torch_generator_states()
        with super().in_forward(module):
            yield
        # A compiled graph runs under no mode: only the moved generators show that it drew.
        if not self._forwards[-1][2].ledger.draws and torch_generator_states() != before:
            self._fused.add(COMPILED)

    def close(self, update: int) -> None:
        """Writes the draws of the update that is over."""
        super().close(update)
        written: list[Any] = []
        for key, shapes, recorder in self._forwards:
            ledger = recorder.ledger
            self._fused |= ledger.fused
            self._count += len(ledger.draws)
            # Masks are packed: dropout draws one element for every activation.
            written.append((key, shapes, [{**vars(draw), "value": pack_mask(draw.value)} for draw in ledger.draws]))
        if any(draws for _, _, draws in written):
            torch.save(written, self._folder / f"draws-{update}.pt")
        self._forwards.clear()


class DealtDraws(ForwardDraws):
    """The accumulated run: a `Dealer` per forward, over the draws of the full-batch run's forward at the same place.

    The rows of the inputs tell which place that is. Where they do not, micro-batch k's j-th forward takes from the full
    batch's j-th, counted among forwards of the same model in the same mode.
    """

    def __init__(self, arithmetic: Arithmetic, sources: Sequence[Path]) -> None:
        super().__init__(arithmetic)
        self._sources = sources
        self._outside: list[bytes] | None = None  # the generators at the end of the last forward
        self._open(1)

    def _open(self, update: int) -> None:
        """Turns to the draws of update number `update`."""
        self._entries: list[tuple[Shapes, Dealing]] = []
        self._places: dict[Key, list[int]] = {}
        self._seen: Counter[Key] = Counter()
        self._starts: Counter[int] = Counter()
        rows: list[ForwardInputs] = []
        # The rows of all ranks, because a sample of this rank may have been another one's in the full-batch run.
        for path in (source / f"draws-{update}.pt" for source in self._sources):
            if path.exists():
                rows += read_rows(path.with_name(f"rows-{update}.pt"))
                for key, shapes, draws in torch.load(path, weights_only=False):
                    ledger = DrawLedger(tuple(Draw(**{**draw, "value": unpack_mask(draw["value"])}) for draw in draws))
                    self._places.setdefault(key, []).append(len(self._entries))
                    self._entries.append((shapes, Dealing(ledger)))
        self._matcher = Matcher(rows)

    def _close(self) -> None:
        """Adds up what came of dealing."""
        self._finish()
        for _, dealing in self._entries:
            self._dealt += dealing.report.dealt
            self._unaligned |= dealing.report.unaligned
        self._entries = []

    def _finish(self) -> None:
        if isinstance(self._handler, Dealer):
            self._handler.finish()
        self._handler = None

    def _next(self, key: Key, shapes: Shapes, prints: ForwardInputs) -> Dealer | None:
        self._finish()
        places = self._places.get(key)
        if not places:
            return None
        spot = self._matcher.find(places, prints)
        place = spot.forward if spot is not None else places[self._seen[key] % len(places)]
        self._seen[key] += 1
        full, dealing = self._entries[place]
        rows = _batch_rows(full, shapes)
        if rows is None:
            return None
        full_count, count = rows
        # Rows that lie one behind the other need only a start; without a spot they follow the last micro-batch's.
        order = spot.places if spot is not None and spot.is_scattered else None
        start = spot.places[0] if spot is not None and order is None else self._starts[place]
        self._starts[place] = start + count
        if start + count > full_count:
            self._unaligned.setdefault("forward", "the window holds more samples than the full batch")
            return None
        return Dealer(dealing, start, start + count, full_count, order)

    def leave_forward(self) -> None:
        """Remembers the generators."""
        self._outside = None if self.deals_loop_draws else torch_generator_states()

    def enter_backward(self) -> None:
        """Notes that something drew between the forward and its backward, in the loss, say: that is not dealt out."""
        if self._outside is not None and torch_generator_states() != self._outside:
            self._unaligned["outside the model"] = "drawn between the forward and its backward"
        self._outside = None

    def close(self, update: int) -> None:
        """Ends an update."""
        super().close(update)
        if not self.repeats_first_update:
            self._close()
            self._open(update + 1)

    def summarise(self) -> DrawSummary:
        """Returns what came of it, for the closing record."""
        self._close()
        return super().summarise()


def _batch_rows(full: Shapes, micro: Shapes) -> tuple[int, int] | None:
    """Returns the sizes of the first dimension that is smaller in the micro-batch, in the first tensor with one."""
    if len(full) != len(micro):
        return None
    for full_shape, micro_shape in zip(full, micro, strict=True):
        layout = SampleLayout.find(full_shape, micro_shape)
        for dimension in layout.dimensions if layout is not None else ():
            if micro_shape[dimension.at] < full_shape[dimension.at]:
                return full_shape[dimension.at], micro_shape[dimension.at]
    # No dimension is smaller: the forward has all rows, in the first dimension.
    return (full[0][0], micro[0][0]) if full and micro and full[0][0] == micro[0][0] else None


_BITS = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device="cpu")


def pack_mask(value: torch.Tensor) -> Any:
    """Returns a mask as eight elements per byte, with its shape and device; anything else as it is."""
    if value.dtype is not torch.bool:
        return value
    flat = torch.nn.functional.pad(value.detach().cpu().flatten(), (0, -value.numel() % 8))
    return (flat.view(-1, 8) * _BITS).sum(1, dtype=torch.uint8), tuple(value.shape), value.device


def unpack_mask(stored: Any) -> Any:
    """Returns what `pack_mask` was given."""
    if isinstance(stored, torch.Tensor):
        return stored
    bits, shape, device = stored
    return ((bits[:, None] & _BITS) != 0).flatten()[: math.prod(shape)].view(shape).to(device)
