"""Random draws of a script's forwards: kept in the full-batch run, dealt out per sample in the accumulated one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gaverify.audit.job import COMPILED, Job
from gaverify.audit.recording.matching import Matcher
from gaverify.audit.recording.packing import packed, unpacked
from gaverify.passes.isolation.generators import torch_generator_states
from gaverify.passes.modes import OperationMode
from gaverify.passes.precision import Arithmetic, product_of
from gaverify.passes.randomness import Dealer, Draw, DrawRecord, Recomputing, Recorder

Shapes = list[tuple[int, ...]]
Key = tuple[int, bool, int]
"""A model, whether it is in training mode, and how many inputs it is given."""


def draw_mode(handler: Recorder | Dealer | Recomputing, arithmetic: Arithmetic | None = None) -> OperationMode:
    """Returns a mode that gives every random operation to `handler` and notes products; all else runs as it is."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if arithmetic is not None:
            arithmetic.note(product_of(func), args)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return handler(func, args, kwargs)
        return func(*args, **kwargs)

    return OperationMode(handle)


class KeptDraws:
    """The full-batch run: one `Recorder` per forward, written when the update is over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._forwards: list[tuple[Key, Shapes, Recorder]] = []
        self.fused: set[str] = set()
        self.count = 0

    def handler(self, key: Key, shapes: Shapes) -> Recorder:
        """Returns the handler of the next forward."""
        recorder = Recorder(shapes[0][0] if shapes else 1)
        self._forwards.append((key, shapes, recorder))
        return recorder

    @contextmanager
    def watched(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Runs a forward; notes when it drew out of sight, as a compiled graph does."""
        before, recorder = torch_generator_states(), self._forwards[-1][2]
        with inner:
            yield
        if not recorder.record.draws and torch_generator_states() != before:
            self.fused.add(COMPILED)

    def close(self, update: int) -> None:
        """Writes the draws of the update that is over."""
        written: list[Any] = []
        for key, shapes, recorder in self._forwards:
            self.fused |= recorder.record.fused
            self.count += len(recorder.record.draws)
            draws = [{**vars(draw), "value": packed(draw.value)} for draw in recorder.record.draws]
            written.append({"key": key, "shapes": shapes, "draws": draws})
        if any(entry["draws"] for entry in written):
            torch.save(written, self._folder / f"draws-{update}.pt")
        self._forwards.clear()


class DealtDraws:
    """The accumulated run: a `Dealer` per forward, over the draws of the full-batch run's forward at the same place.

    The rows of the inputs tell which place that is. Where they do not, micro-batch k's j-th forward takes from the full
    batch's j-th, counted among forwards of the same model in the same mode.
    """

    def __init__(self, sources: Sequence[Path]) -> None:
        self._sources = sources
        self._update = 0
        self._entries: list[tuple[Shapes, DrawRecord]] = []
        self._places: dict[Key, list[int]] = {}
        self._matcher = Matcher([])
        self._seen: dict[Key, int] = {}
        self._starts: dict[int, int] = {}
        self._dealer: Dealer | None = None
        self.sliced = 0
        self.unaligned: dict[str, str] = {}

    def open(self, update: int) -> None:
        """Turns to the draws of update number `update`."""
        self.close()
        self._update, self._seen, self._starts = update, {}, {}
        paths = [source / f"draws-{update}.pt" for source in self._sources]
        drawn = [path for path in paths if path.exists()]
        entries = [entry for path in drawn for entry in torch.load(path, weights_only=False)]
        self._places = {}
        for entry in entries:
            draws = [Draw(**{**draw, "value": unpacked(draw["value"])}) for draw in entry["draws"]]
            self._places.setdefault(entry["key"], []).append(len(self._entries))
            self._entries.append((entry["shapes"], DrawRecord(draws)))
        if entries:
            rows = [torch.load(path.with_name(f"rows-{update}.pt"), weights_only=True) for path in drawn]
            self._matcher = Matcher([prints for run in rows for prints in run])

    def close(self) -> None:
        """Adds up what came of dealing."""
        self._finish()
        for _, record in self._entries:
            self.sliced += record.sliced
            self.unaligned |= record.unaligned
        self._entries = []

    def handler(self, key: Key, shapes: Shapes, prints: dict[str, Any]) -> Dealer | None:
        """Returns the handler of the next forward."""
        self._finish()
        places = self._places.get(key)
        if not places:
            return None
        spot = self._matcher.find(places, prints)
        place = spot.forward if spot is not None else places[self._seen.get(key, 0) % len(places)]
        self._seen[key] = self._seen.get(key, 0) + 1
        full, record = self._entries[place]
        rows = _batch_rows(full, shapes)
        if rows is None:
            return None
        whole, part = rows
        order = spot.places if spot is not None and spot.scattered else None
        start = spot.places[0] if spot is not None and order is None else self._starts.get(place, 0)
        self._starts[place] = start + part
        if start + part > whole:
            self.unaligned.setdefault("forward", "the window holds more samples than the full batch")
            return None
        self._dealer = Dealer(record, start, start + part, whole, order)
        return self._dealer

    def _finish(self) -> None:
        if self._dealer is not None:
            self._dealer.finish()
        self._dealer = None


class Draws:
    """What a run does about random draws: keeps them, deals them out, or nothing, as its role asks.

    Args:
        job: The run.
        folder: Where it writes.
        arithmetic: What the script computes in.
    """

    def __init__(self, job: Job, folder: Path, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._kept = KeptDraws(folder) if job.role == "full" else None
        self._eager = job.eager
        self._replayed = job.replay  # what is drawn outside the forwards is dealt out as well
        self._held = job.role == "frozen"  # all its steps belong to the full batch's first update
        dealt = job.source is not None and job.role in ("accumulated", "frozen")
        self._dealt = DealtDraws([Path(source) for source in job.sources]) if dealt else None
        self._outside: list[bytes] | None = None  # the generators at the end of the last forward
        self._handlers: list[Recorder | Dealer] = []  # of the window's forwards
        self._handler: Recorder | Dealer | None = None
        if self._dealt is not None:
            self._dealt.open(1)

    def begin(self, key: Key, shapes: Shapes, prints: dict[str, Any]) -> None:
        """Turns to the next forward: of which model in which mode, and the shapes and fingerprints of its inputs."""
        self._handler = None
        if self._kept is not None:
            self._handler = self._kept.handler(key, shapes)
        elif self._dealt is not None:
            self._handler = self._dealt.handler(key, shapes, prints)
        if self._handler is not None:
            self._handlers.append(self._handler)

    def in_forward(self, module: nn.Module | None) -> AbstractContextManager[Any]:
        """Returns what to run a forward in; compiled graphs do not run under a mode, their draws stay their own."""
        if module is None:
            return nullcontext()
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        hidden = compiled and not self._eager
        inner = nullcontext() if self._handler is None or hidden else draw_mode(self._handler, self._arithmetic)
        return self._kept.watched(inner) if self._kept is not None else inner

    def in_backward(self) -> AbstractContextManager[Any]:
        """Returns what to run a backward in: checkpointing draws again there."""
        return draw_mode(Recomputing(self._handlers), self._arithmetic) if self._handlers else nullcontext()

    def leave_forward(self) -> None:
        """Remembers the generators: what they draw from here to the backward is not the model's."""
        self._outside = torch_generator_states() if self._dealt is not None and not self._replayed else None

    def enter_backward(self) -> None:
        """Notes draws between the forward and its backward (in the loss, say), which nobody deals out."""
        if self._outside is not None and self._dealt is not None and torch_generator_states() != self._outside:
            self._dealt.unaligned["outside the model"] = "drawn between the forward and its backward"
        self._outside = None

    def close(self, update: int) -> None:
        """Ends an update."""
        self._handlers = []
        if self._kept is not None:
            self._kept.close(update)
        if self._dealt is not None and not self._held:
            self._dealt.open(update + 1)

    def summary(self) -> dict[str, Any]:
        """Returns what came of it, for the closing record."""
        if self._dealt is not None:
            self._dealt.close()
        return {
            "fused": sorted(self._kept.fused) if self._kept else [],
            "draws": self._kept.count if self._kept else 0,
            "dealt": self._dealt.sliced if self._dealt else 0,
            "unaligned": self._dealt.unaligned if self._dealt else {},
        }


def _batch_rows(full: Shapes, micro: Shapes) -> tuple[int, int] | None:
    """The rows of the full batch and of the micro-batch: the first dimension that shrank, in the first such tensor."""
    if len(full) != len(micro):
        return None
    for whole, part in zip(full, micro, strict=True):
        if len(whole) == len(part):
            for a, b in zip(whole, part, strict=True):
                if b < a:
                    return a, b
    return (full[0][0], micro[0][0]) if full and micro and full[0][0] == micro[0][0] else None
