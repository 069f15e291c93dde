"""State that forwards change (buffers, frozen parameters, attributes), restored before each micro-batch of a window."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from gaverify.audit.recording.values import plain, plain_name, same
from gaverify.passes.isolation import StatePlace, keep_places, places_of_module
from gaverify.records.events import ChangedValue, ValuePlace
from gaverify.tracebacks import LineHunt, Owner, Place

EVERYTHING = "*"
"""Stands for all values of modules in a list of names."""

_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


Content = torch.Tensor | int | float | list[int | float]
"""A value as files hold it."""


def values_of(root: nn.Module, prefix: str, *, unread: bool = False, trained: bool = False) -> dict[str, StatePlace]:
    """Returns the places whose values forwards of a module may change and read again, by their names.

    Args:
        root: The module.
        prefix: Stands before their names.
        unread: Also the running statistics that no forward in training reads.
        trained: Also the parameters that need a gradient.
    """
    values: dict[str, StatePlace] = {}
    for place in places_of_module(root):
        if place.kind == "parameter":
            # A frozen parameter may be a moving average that a forward updates, as those of a teacher are.
            is_state = trained or not place.bound.requires_grad
        elif place.kind == "buffer":
            is_state = place.bound is not None and (unread or not _has_unread_statistics(place.module))
        else:
            is_state = _is_state(place.bound)
        if is_state:
            path = f"{plain_name(place.path)}." if place.path else ""
            values[prefix + path + place.holder.word(place.key)] = place
    return values


def _has_unread_statistics(module: nn.Module | None) -> bool:
    """Whether its forward is torch's own, which updates running statistics in training and does not read them."""
    return isinstance(module, _NORMS) and module.training and type(module).forward.__module__.startswith("torch.")


def _is_state(value: Any) -> bool:
    """Whether an attribute of the user's may count or average."""
    if isinstance(value, torch.Tensor):
        # a tensor that needs a gradient is an output that the module keeps for later
        return not isinstance(value, nn.Parameter) and not value.requires_grad and plain(value) is not None
    entries = value if isinstance(value, list | deque) else [value]
    # A bool is a switch and counts nothing, although Python takes it for an int.
    return all(isinstance(entry, int | float) for entry in entries) and not isinstance(value, bool)


def read_content(place: StatePlace) -> Content | None:
    """Returns a value as files hold it; None where it cannot be read."""
    value = place.get()
    if isinstance(value, torch.Tensor):
        return plain(value)
    if isinstance(value, list | deque):
        return [_number(entry) for entry in value]
    return None if value is None else _number(value)


def _number(value: Any) -> int | float:
    """Returns a number of Python's: those of NumPy are subclasses, which no file of tensors may hold."""
    return int(value) if isinstance(value, int) else float(value)


def copy_content(content: Content) -> Content:
    """Returns a copy that no forward changes."""
    return content.clone() if isinstance(content, torch.Tensor) else content


def is_same(before: Content | None, now: Content | None) -> bool:
    """Whether a value is what it was."""
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        return same(before, now)
    return type(before) is type(now) and bool(before == now)


class StateRestorer:
    """Restores values before each micro-batch, and notes which values forwards change.

    A micro-batch begins with the first forward behind a backward pass, a window with the first one behind a step.

    Args:
        names: The names of the values; `EVERYTHING` stands for all.
        work: Surrounds the recorder's own code.
    """

    def __init__(self, names: tuple[str, ...], work: Callable[[], AbstractContextManager[None]]) -> None:
        self._names, self._work = names, work
        self._roots: dict[int, tuple[nn.Module, str]] = {}
        self._restorers: list[Callable[[], None]] = []  # to the values at the window's beginning
        self._seen_roots: set[int] = set()  # in this window
        self._is_behind_backward = False
        self._places: dict[str, Place] = {}
        self._changed: dict[str, ValuePlace] = {}

    def end_window(self) -> None:
        """A step is over: the next forward begins a window."""
        self._restorers.clear()
        self._seen_roots.clear()

    def end_micro_batch(self) -> None:
        """A backward pass is over: the next forward begins a micro-batch."""
        self._is_behind_backward = True

    def describe(self) -> tuple[ChangedValue, ...]:
        """Returns everything that a forward changed."""
        return tuple(ChangedValue(name, place, self._places.get(name)) for name, place in self._changed.items())

    @contextmanager
    def around(self, root: nn.Module, prefix: str) -> Iterator[None]:
        """Surrounds the forward of an outermost module."""
        with self._work():
            self._begin(root, prefix)
            values = values_of(root, prefix)
            before = {
                name: copy_content(content)
                for name, place in values.items()
                if (content := read_content(place)) is not None
            }
        hunt = LineHunt(lambda place: self._look(place, values, before), Owner.LIBRARY)
        # comparing all values after every line takes long: only those that were asked for by name
        unplaced = [name for name in self._names if name in before and name not in self._places]
        # A debugger keeps its own trace function.
        if unplaced and sys.gettrace() is None:
            hunt.start()
        try:
            yield
        finally:
            hunt.stop()
            with self._work():
                for name, content in before.items():
                    if not is_same(content, read_content(values[name])):
                        self._changed.setdefault(name, values[name].kind)

    def _begin(self, root: nn.Module, prefix: str) -> None:
        for restore in self._restorers if self._is_behind_backward else ():
            restore()
        self._is_behind_backward = False
        self._roots[id(root)] = root, prefix
        # All models at once: a forward of this one may change values of another one before its own forward.
        for key, (module, start) in self._roots.items():
            if key not in self._seen_roots:
                self._seen_roots.add(key)
                places = [
                    place
                    for name, place in values_of(module, start).items()
                    if (EVERYTHING in self._names or name in self._names) and read_content(place) is not None
                ]
                self._restorers.append(keep_places(places))

    def _look(self, place: Place, values: Mapping[str, StatePlace], before: Mapping[str, Any]) -> bool:
        with self._work():
            unplaced = [name for name in self._names if name in before and name not in self._places]
            changed = [name for name in unplaced if not is_same(before[name], read_content(values[name]))]
            self._places |= dict.fromkeys(changed, place)
            return all(name in self._places for name in unplaced)
