"""State that forwards change (buffers, frozen parameters, attributes), restored before each micro-batch of a window."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gaverify.audit.recording.values import plain, plain_name
from gaverify.passes.isolation import OWN_ATTRIBUTES
from gaverify.records.events import ChangedValue, ValuePlace
from gaverify.torch_internals import buffers_of
from gaverify.tracebacks import LineHunt, Owner, Place

EVERYTHING = "*"
"""Stands for all values of modules in a list of names."""

_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


@dataclass(frozen=True)
class Value:
    """One value of a module: a tensor, a number, or a list of numbers."""

    module: nn.Module
    name: str
    place: ValuePlace

    def get(self) -> Any:
        """Returns the module's value now; None where it has none."""
        value = getattr(self.module, self.name, None)
        return plain(value) if isinstance(value, torch.Tensor) else value

    def copy(self) -> Any:
        """Returns a copy that no forward changes."""
        value = self.get()
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)

    def differs(self, earlier: Any) -> bool:
        """Whether the module's value is another than an earlier one."""
        value = self.get()
        if isinstance(value, torch.Tensor) and isinstance(earlier, torch.Tensor):
            return value.shape != earlier.shape or not torch.equal(value, earlier)
        return type(value) is not type(earlier) or bool(value != earlier)

    def put(self, earlier: Any) -> None:
        """Restores a value."""
        value = self.get()
        if isinstance(value, torch.Tensor) and isinstance(earlier, torch.Tensor) and value.shape == earlier.shape:
            with torch.no_grad():
                value.copy_(earlier)  # in place: other modules may share the tensor
        else:
            setattr(
                self.module, self.name, earlier.clone() if isinstance(earlier, torch.Tensor) else copy.copy(earlier)
            )


def values_of(root: nn.Module, prefix: str, *, unread: bool = False, trained: bool = False) -> dict[str, Value]:
    """Returns the values that forwards of a module may change and read again, by their names.

    Args:
        root: The module.
        prefix: What stands before their names.
        unread: Also the running statistics that no forward in training reads.
        trained: Also the parameters that need a gradient.
    """
    values: dict[str, Value] = {}
    for path, module in root.named_modules():
        # A frozen parameter may be a moving average that a forward updates, as those of a teacher are.
        names: dict[str, ValuePlace] = {
            name: "parameter" for name, p in module.named_parameters(recurse=False) if trained or not p.requires_grad
        }
        if unread or not _has_unread_statistics(module):
            names |= {name: "buffer" for name, buffer in buffers_of(module).items() if buffer is not None}
        names |= {name: "attribute" for name, value in vars(module).items() if _is_state(name, value)}
        start = prefix + (f"{plain_name(path)}." if path else "")
        values |= {start + name: Value(module, name, kind) for name, kind in names.items()}
    return values


def _has_unread_statistics(module: nn.Module) -> bool:
    """Whether its forward is torch's own, which updates running statistics in training and does not read them."""
    return isinstance(module, _NORMS) and module.training and type(module).forward.__module__.startswith("torch.")


def _is_state(name: str, value: Any) -> bool:
    """Whether an attribute of the user's may count or average."""
    if name in OWN_ATTRIBUTES:
        return False
    if isinstance(value, torch.Tensor):
        # a tensor that needs a gradient is an output that the module keeps for later
        return not isinstance(value, nn.Parameter) and not value.requires_grad and plain(value) is not None
    entries = value if isinstance(value, list | deque) else [value]
    # A bool is a switch and counts nothing, although Python takes it for an int.
    return all(isinstance(entry, int | float) for entry in entries) and not isinstance(value, bool)


class RestoredState:
    """Restores values before each micro-batch, and notes which values forwards change.

    A micro-batch begins with the first forward behind a backward pass, a window with the first one behind a step.

    Args:
        names: Of the values; `EVERYTHING` stands for all.
        work: Surrounds the recorder's own code.
    """

    def __init__(self, names: tuple[str, ...], work: Callable[[], AbstractContextManager[None]]) -> None:
        self._names, self._work = names, work
        self._roots: dict[int, tuple[nn.Module, str]] = {}
        self._originals: dict[str, tuple[Value, Any]] = {}  # with the values at the window's beginning
        self._seen_roots: set[int] = set()  # in this window
        self._is_behind_backward = False
        self._places: dict[str, Place] = {}
        self._changed: dict[str, ValuePlace] = {}

    def end_window(self) -> None:
        """A step is over: the next forward begins a window."""
        self._originals.clear()
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
            before = {name: value.copy() for name, value in values.items()}
        hunt = LineHunt(lambda place: self._look(place, values, before), Owner.LIBRARY)
        # comparing all values after every line takes long: only those that were asked for by name
        unplaced = [name for name in self._names if name in values and name not in self._places]
        # A debugger keeps its own trace function.
        if unplaced and sys.gettrace() is None:
            hunt.start()
        try:
            yield
        finally:
            hunt.stop()
            with self._work():
                for name, value in values.items():
                    if value.differs(before[name]):
                        self._changed.setdefault(name, value.place)

    def _begin(self, root: nn.Module, prefix: str) -> None:
        if self._originals and self._is_behind_backward:
            for value, original in self._originals.values():
                value.put(original)
        self._is_behind_backward = False
        self._roots[id(root)] = root, prefix
        # All models at once: a forward of this one may change values of another one before its own forward.
        for key, (module, start) in self._roots.items():
            if key not in self._seen_roots:
                self._seen_roots.add(key)
                for name, value in values_of(module, start).items():
                    if EVERYTHING in self._names or name in self._names:
                        self._originals[name] = value, value.copy()

    def _look(self, place: Place, values: Mapping[str, Value], before: Mapping[str, Any]) -> bool:
        with self._work():
            unplaced = [name for name in self._names if name in values and name not in self._places]
            self._places |= {name: place for name in unplaced if values[name].differs(before[name])}
            return all(name in self._places for name in unplaced)
