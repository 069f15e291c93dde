"""State that one update leaves to the next, in a run whose steps are led along the full-batch run.

Running statistics, queues and power iterations change with each micro-batch. Before the first forward of an update they
are set to the full-batch run's: else that update would be judged for the effect of earlier ones. State that the
script's own code changes between calls (a router's bias, a teacher, a number) is compared, and stays as it is.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gaverify.audit.recording.sketching import sketch_piece
from gaverify.audit.recording.state import EVERYTHING, Content, copy_content, is_same, read_content, values_of
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.values import Names, same
from gaverify.passes.isolation import StatePlace
from gaverify.passes.layouts import real_numbers
from gaverify.passes.precision import buffers_differ
from gaverify.records.events import CarriedValue, ValuePlace
from gaverify.thresholds import KEPT_ELEMENTS, SKETCH_WIDTHS
from gaverify.tracebacks import LineHunt, Owner, Place

_ELEMENTS = 4096  # of a parameter that are looked at


class CarriedState:
    """Stores the state before each update, or compares it with the full-batch run's.

    Args:
        names: The script's models.
        storage: Where the full-batch run stores.
        source: The folder of the full-batch run; None where this is that run.
        work: Surrounds the recorder's own code.
    """

    def __init__(
        self, names: Names, storage: Storage, source: Path | None, work: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._names, self._storage, self._source, self._work = names, storage, source, work
        self._untrained: dict[int, nn.Module] = {}  # outermost modules that train nothing: teachers, criteria
        self._left_by_call: dict[str, Content] = {}  # in the full-batch run, what is looked at of each value
        self._made_by_script: set[str] = set()  # changed between calls since the last update ended
        self._before_update: dict[str, Content | ContentSketch] = {}  # in the full-batch run
        self._step = ""  # the last one, until the next update begins
        self._places: dict[str, Place] = {}
        self._hunt: LineHunt | None = None
        self.aligned: tuple[str, ...] = ()
        """Names of values that are set to the full-batch run's whatever made them."""
        self.kept: tuple[str, ...] = ()
        """Names of values that are never set: a repair of them is tested."""
        self._differences: dict[tuple[int, str], ValuePlace] = {}

    def end_step(self, step: str) -> None:
        """A step is over: the next forward that trains begins an update."""
        self._step = step

    def begin_call(self) -> None:
        """A call begins, in the full-batch run: since the last one only the script's own code has run."""
        for name, value in self._values().items():
            before = self._left_by_call.get(name)
            if before is not None and not is_same(before, _look(value)):
                self._made_by_script.add(name)

    def end_call(self) -> None:
        """A call is over, in the full-batch run."""
        for name, value in self._values().items():
            now = _look(value)
            if now is not None and not is_same(self._left_by_call.get(name), now):
                self._left_by_call[name] = copy_content(now)

    def begin_forward(self, module: nn.Module, *, trains: bool, update: int, unit: float) -> None:
        """A forward begins, and may begin an update.

        Args:
            module: An outermost module.
            trains: Whether it has something to train.
            update: Number of the update that is being worked on.
            unit: Unit roundoff of the arithmetic behind gradients.
        """
        if not trains and not self._names.is_part(module):
            self._untrained.setdefault(id(module), module)
        if self._step and self._source is not None and (trains or id(module) in self._untrained):
            # A teacher may run before the student: its own forward is then the first that reads its state.
            self._align(None if trains else module, update, unit)
        if self._step and trains:
            if self._source is None:
                self._store()
            self._step = ""
        for name, value in self._values().items():
            # A value that never changes is not stored: all runs begin with it.
            if name not in self._before_update and (content := read_content(value)) is not None:
                is_aligned = _plain(name) in self.aligned or EVERYTHING in self.aligned
                self._before_update[name] = copy_content(content) if is_aligned else _copy_or_sketch(name, content)

    def hunt(self) -> None:
        """Looks for the lines of the script's own code that change what a control aligns, until `end_hunt`."""
        wanted = {
            name: value for name, value in self._values().items() if _plain(name) in {*self.aligned} - {*self._places}
        }
        before = {name: copy_content(now) for name, value in wanted.items() if (now := _look(value)) is not None}
        if before and sys.gettrace() is None:  # a debugger keeps its own trace function

            def has_changed(place: Place) -> bool:
                with self._work():
                    changed = [_plain(name) for name, now in before.items() if not is_same(now, _look(wanted[name]))]
                    for name in changed:
                        self._places.setdefault(name, place)
                return len(changed) == len(before)

            self._hunt = LineHunt(has_changed, Owner.USER)
            self._hunt.start(running=True)

    def end_hunt(self) -> None:
        """Stops to look after every line."""
        if self._hunt is not None:
            self._hunt.stop()
            self._hunt = None

    def describe(self) -> tuple[CarriedValue, ...]:
        """Returns the values that differed before an update."""
        return tuple(
            CarriedValue(update, name, place, self._places.get(name))
            for (update, name), place in self._differences.items()
        )

    def _store(self) -> None:
        """Stores what has changed since the update before, and what of it the script's own code has made."""
        changed = {
            name: now
            for name, value in self._values().items()
            if (now := read_content(value)) is not None and not _is_unchanged(name, self._before_update.get(name), now)
        }
        if changed:
            self._storage.tensors(f"state-{self._step}", (changed, sorted(self._made_by_script)))
        self._before_update |= {name: _copy_or_sketch(name, now) for name, now in changed.items()}
        self._made_by_script.clear()

    def _align(self, module: nn.Module | None, update: int, unit: float) -> None:
        """Sets the state to the full-batch run's, or compares it with that; of one module, or of all."""
        changed: Mapping[str, Content] = {}
        made_by_script: list[str] = []
        path = (self._source or Path()) / f"state-{self._step}.pt"
        if path.exists():
            changed, made_by_script = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        self._before_update |= changed
        for name, value in self._values(module).items():
            content, full = read_content(value), self._before_update.get(name)
            if content is None or full is None or _plain(name) in self.kept or not _differs(name, content, full, unit):
                continue
            if value.kind == "buffer" and name in changed and name not in made_by_script:
                _set_buffer(content, changed[name])
                continue
            self._differences[update, _plain(name)] = value.kind
            if not isinstance(full, ContentSketch) and (_plain(name) in self.aligned or EVERYTHING in self.aligned):
                _set(value, full)

    def _values(self, only: nn.Module | None = None) -> dict[str, StatePlace]:
        """Returns the values of all outermost modules, or of one; a teacher's parameters are some, frozen or not."""
        values: dict[str, StatePlace] = {}
        for at, model in enumerate(self._names.models):
            if only is None or only is model:
                values |= values_of(model, f"{at}:", unread=True)
        for at, module in enumerate(self._untrained.values()):
            if only is None or only is module:
                values |= values_of(module, f"untrained {at}:{type(module).__name__}.", unread=True, trained=True)
        return values


def _plain(name: str) -> str:
    return name.partition(":")[2]


def _look(value: StatePlace) -> Content | None:
    """Returns what tells whether a value has changed: some elements of a parameter, else all of it."""
    content = read_content(value)
    if value.kind == "parameter" and isinstance(content, torch.Tensor) and content.layout is torch.strided:
        return content.reshape(-1)[:: max(1, content.numel() // _ELEMENTS)]
    return content


@dataclass(frozen=True)
class ContentSketch:
    """Stands for the values of a large tensor: a model may be frozen but for a few adapters."""

    numbers: torch.Tensor
    """Its sketch, as of a gradient."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its type."""


def _copy_or_sketch(name: str, content: Content) -> Content | ContentSketch:
    """Returns what tells later whether a value has changed: a sketch of a large tensor, else a copy."""
    if not isinstance(content, torch.Tensor) or content.numel() <= KEPT_ELEMENTS or not content.is_floating_point():
        return copy_content(content)
    if content.layout is not torch.strided:
        return copy_content(content)
    sketch = sketch_piece(content, name, SKETCH_WIDTHS[0], content.shape)
    return ContentSketch(sketch, tuple(content.shape), content.dtype)


def _is_unchanged(name: str, before: Content | ContentSketch | None, now: Content) -> bool:
    """Whether a value is what it was."""
    if not isinstance(before, ContentSketch):
        return is_same(before, now)
    after = _copy_or_sketch(name, now)
    return (
        isinstance(after, ContentSketch)
        and (before.shape, before.dtype) == (after.shape, after.dtype)
        and same(before.numbers, after.numbers)
    )


def _differs(name: str, content: Content, full: Content | ContentSketch, unit: float) -> bool:
    """Whether a value is further from the full-batch run's than rounding."""
    if isinstance(full, ContentSketch):
        ours_sketched = _copy_or_sketch(name, content)
        if not isinstance(ours_sketched, ContentSketch) or ours_sketched.shape != full.shape:
            return True
        content, full = ours_sketched.numbers, full.numbers
    ours, theirs = (
        part if isinstance(part, torch.Tensor) else torch.tensor(part, dtype=torch.float64, device="cpu")
        for part in (content, full)
    )
    if ours.shape != theirs.shape or ours.is_complex() != theirs.is_complex():
        return True
    ours, theirs = (part.to_dense() if part.layout is not torch.strided else part for part in (ours, theirs))
    return buffers_differ(real_numbers(ours).double().cpu(), real_numbers(theirs).double(), unit)


def _set_buffer(buffer: Content, full: Content) -> None:
    """Sets a buffer in place, because modules may share it; one of another shape stays."""
    if isinstance(buffer, torch.Tensor) and isinstance(full, torch.Tensor) and buffer.shape == full.shape:
        buffer.copy_(full)


def _set(place: StatePlace, full: Content) -> None:
    """Sets a value to the full-batch run's, in place where its shape is the same, and in the type that it has."""
    current, content = place.get(), read_content(place)
    if isinstance(content, torch.Tensor) and isinstance(full, torch.Tensor):
        if content.shape == full.shape:  # in place: other modules may share the tensor
            content.copy_(full)
        else:
            place.holder.bind(place.key, full.to(content.device, copy=True))
    elif isinstance(full, list):
        place.holder.bind(place.key, deque(full, current.maxlen) if isinstance(current, deque) else [*full])
    else:
        place.holder.bind(place.key, full)
