"""Finds the state that a forward changes and the next micro-batch reads, by summaries of its values.

Values are compared because the kernel of BatchNorm changes running statistics without increasing their `_version`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gaverify.passes.calls import FunctionMode
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import (
    RewindableIterator,
    StatePlace,
    entries_of,
    merge_names,
    places_of_module,
    variables,
)
from gaverify.passes.isolation.places import Holder
from gaverify.passes.isolation.tensors import Tensors
from gaverify.passes.isolation.walk import CANNOT_CHANGE, ValueWalk
from gaverify.passes.layouts import real_numbers, summaries
from gaverify.passes.precision import widest
from gaverify.records.comparison import StateChange
from gaverify.records.events import ValuePlace
from gaverify.records.experiment import Operation
from gaverify.search.trace.operations import address, watch_writes
from gaverify.search.trace.traces import Frame, locate_operation
from gaverify.torch_internals import (
    no_dispatch_modes,
    version_of,
    without_subclass_function,
    without_torch_function,
)
from gaverify.tracebacks import calling_frame, hands_over

_MOST = 1_000  # entries of one container that are looked at
_ALL = 10_000  # values that are looked at in all
_BYTES = 1 << 20  # of an array that are hashed
_NUMBERS = (int, float, bool, str, type(None))


@dataclass
class TensorDigest:
    """A comparable summary of a tensor."""

    shape: tuple[int, ...]
    """Its shape."""
    numbers: tuple[float, ...] = ()
    """Its sum, two projections and its norm; empty for a sparse or empty one."""


class _Unread:
    """Digests whose numbers lie on the devices still: one transfer for all, where each would wait for the device."""

    def __init__(self) -> None:
        self._devices: dict[torch.device, list[tuple[TensorDigest, torch.Tensor]]] = {}

    def add(self, tensor: torch.Tensor) -> TensorDigest:
        """Returns the digest of a tensor, without its numbers."""
        digest = TensorDigest(tuple(tensor.shape))
        if tensor.numel() and tensor.layout is torch.strided:
            flat = real_numbers(tensor).reshape(-1).to(widest(tensor.device))
            numbers = torch.cat([flat.sum().unsqueeze(0), summaries(flat)])
            self._devices.setdefault(tensor.device, []).append((digest, numbers))
        return digest

    def read(self) -> None:
        """Fills in the numbers of all digests."""
        for entries in self._devices.values():
            rows = torch.stack([numbers for _, numbers in entries]).tolist()
            for (digest, _), row in zip(entries, rows, strict=True):
                digest.numbers = tuple(row)


class _Summary(ValueWalk):
    """A walk that keeps nothing, and writes down what it meets in the order in which it meets it."""

    def __init__(self, unread: _Unread) -> None:
        super().__init__(Tensors(), frozenset(), frozenset())
        self._unread = unread
        self._parts: list[Any] = []

    def take_digests(self, named: Mapping[str, StatePlace]) -> dict[str, Any]:
        """Returns by name what the walks from each place write down."""
        digests = {name: self._take_digest(place.get()) for name, place in named.items()}
        self._handlers.clear()
        return digests

    def _take_digest(self, value: Any) -> Any:
        """Returns a comparable summary of a value: numbers as they are, tensors by projections, containers by entries.

        Nothing is said of modules, functions, classes and random generators, whose state is compared elsewhere
        or is none.
        """
        if type(value) in _NUMBERS:  # most attributes of modules
            return value
        self._parts, self._objects_left = [], _ALL
        self._seen.clear()
        self._waiting.clear()
        try:
            self._search([value])
        except Exception:  # an object of the user's that raises when it is read must not hide the other values
            return None
        return self._parts

    def _wait_for(self, values: Iterable[Any]) -> None:
        for value in values:
            if issubclass(type(value), CANNOT_CHANGE):
                self._parts.append(value)
            else:
                super()._wait_for((value,))

    def _keep(self, holder: Holder) -> list[Any]:
        entries = holder.read()
        self._parts += map(holder.word, entries)
        return list(entries.values())

    def _tensor(self, tensor: torch.Tensor, *, buffer: bool = False) -> Iterable[Any]:
        self._parts.append(self._unread.add(tensor))
        return ()

    def _iterator(self, iterator: RewindableIterator) -> Iterable[Any]:
        self._parts.append(iterator.position)
        return ()

    def _container(self, value: Any) -> Iterable[Any]:
        self._parts += (type(value).__name__, len(value))
        if isinstance(value, set | frozenset):  # without an order, the entries cannot be compared one by one
            self._parts.append(hash(frozenset(value)) if len(value) <= _MOST else 0)
            return ()
        keys = entries_of(value, _MOST) if isinstance(value, dict) else ()
        self._parts += (key if issubclass(type(key), CANNOT_CHANGE) else type(key).__name__ for key in keys)
        return [*entries_of(value, _MOST, values=True), *self._object(value)]

    _walk_tuple = _container

    def _bytes(self, value: Any) -> Iterable[Any]:
        self._parts += (len(value), hash(bytes(memoryview(value).cast("B")[:_BYTES])))
        return self._object(value)

    def _array(self, value: Any) -> Iterable[Any]:
        flat = value.ravel()
        self._parts += value.shape
        if value.dtype.hasobject:
            return flat[:_MOST].tolist()  # type: ignore[no-any-return]
        self._parts.append(hash(flat[: _BYTES // max(1, value.itemsize)].tobytes()))
        return ()


_GRADIENT = "\0gradient"  # the name of gradients among the tensors that are watched: no state has it
_GRAD = torch.Tensor.grad


def find_state(experiment: Experiment) -> dict[str, StatePlace]:
    """Returns everything that a forward may change, by name; the parameters among it are those of model and loss.

    Names are `path.to.buffer`, `path.to.attribute`, and a variable's name for what the loss function can reach.
    """
    return merge_names(_list_state(experiment))


def _list_state(experiment: Experiment) -> Iterator[list[tuple[str, StatePlace]]]:
    """Yields names and places of the model, of a loss that is a module, and of all that the loss can reach."""
    trained = {id(parameter): name for name, parameter in experiment.parameters.items()}
    for root in experiment.modules:
        # a parameter that is trained has one name, also where two modules share it
        yield [(trained.get(id(place.bound), place.name), place) for place in places_of_module(root)]
    modules = {id(module): module for root in experiment.modules for module in root.modules()}
    reached: list[tuple[str, StatePlace]] = []
    for place in variables(experiment.problem.loss, *dict.fromkeys(map(type, modules.values()))):
        value = place.get()
        if not issubclass(type(value), nn.Module):
            reached.append((place.name, place))
        elif id(value) not in modules:  # a teacher, a moving average of the weights
            places = places_of_module(value, f"{place.name}.")
            reached += [
                (each.name, replace(each, kind="closure") if each.kind == "parameter" else each) for each in places
            ]
    yield reached


def take_digests(named: Mapping[str, StatePlace], tensors: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Returns what the values of places, and some tensors, are now, by name, in a form that can be compared."""
    unread = _Unread()
    with no_dispatch_modes(), without_torch_function():
        digests = _Summary(unread).take_digests(named)
        digests |= {name: unread.add(tensor) for name, tensor in (tensors or {}).items()}
        unread.read()
    return digests


class StateWatch(PassProbe):
    """Records what each pass changes, and the line that wrote it."""

    def __init__(self, experiment: Experiment) -> None:
        self._state = experiment.state
        self._places = find_state(experiment)
        self._named = {name: place for name, place in self._places.items() if place.kind != "parameter"}
        # of two names for one value, the first one counts
        owned = [(name, place) for name, place in reversed(self._places.items()) if place.module is not None]
        self._assigned = {place.attribute: name for name, place in owned}
        self._parameters = {address(place.get()): name for name, place in owned if name not in self._named}
        self._changed: dict[str, ValuePlace] = {}
        self._trained = list(experiment.parameters.values())
        self._last: tuple[int, dict[str, Any]] | None = None  # the last micro-batch, and the state that it left
        self.clears_gradients = False
        self.clearing: Operation | None = None  # what changed a gradient first, with its line
        self._reads: set[str] = set()
        self._writers: dict[str, tuple[str, Frame]] = {}
        self.writes: Counter[tuple[str, str, Frame]] = Counter()  # name, operation and line, and how often it wrote

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Compares the state before and after one forward and its backward."""
        # Between two micro-batches nothing runs that could change the state.
        follows = k is not None and self._last is not None and k == self._last[0] + 1
        before = self._last[1] if follows and self._last is not None else self._take_digests()
        # The addresses are looked up anew in each pass, because a forward may replace a buffer by another tensor. The
        # replaced one is held: another tensor at its address would be taken for it.
        values = {name: place.get() for name, place in self._named.items()}
        names = {address(value): name for name, value in values.items() if issubclass(type(value), torch.Tensor)}
        self._gradients = self._stamp_gradients()
        gradients = {address(g): _GRADIENT for g in self._read_gradients() if g is not None}
        with (
            watch_assignments(self._note_assignment),
            watch_writes(names | self._parameters | gradients, self._note_write, names, self._reads.add),
            FunctionMode(self._handle_call),
        ):
            yield
        after = self._take_digests()
        self._last = (k, after) if k is not None else None
        for name, value in after.items():
            if before.get(name) != value:
                self._changed[name] = self._places[name].kind

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Checks whether the forward cleared gradients of the micro-batches before it."""
        self.clears_gradients = self.clears_gradients or self._stamp_gradients() != self._gradients
        super().backward(k, loss, weight)

    def _stamp_gradients(self) -> list[tuple[int, int]]:
        """Which gradient every parameter has, and how often it was written to."""
        return [(id(g), version_of(g)) if g is not None else (0, 0) for g in self._read_gradients()]

    def _read_gradients(self) -> list[torch.Tensor | None]:
        # a weight that is lifted takes a look at its gradient for one of the user's
        with without_subclass_function():
            return [parameter.grad for parameter in self._trained]

    def changes(self) -> tuple[StateChange, ...]:
        """Returns what the passes changed so far."""
        return tuple(StateChange(name, kind, self._locate_writer(name)) for name, kind in self._changed.items())

    def absorb(self, later: StateWatch) -> None:
        """Adds what another watch recorded in later passes of the same experiment."""
        self._changed |= {name: place for name, place in later._changed.items() if name not in self._changed}
        self._writers |= later._writers
        self._reads |= later._reads
        self.clears_gradients = self.clears_gradients or later.clears_gradients
        self.clearing = self.clearing or later.clearing

    def _take_digests(self) -> dict[str, Any]:
        with no_dispatch_modes(), without_torch_function():
            written = {self._parameters.get(address(tensor), ""): tensor.data for tensor in self._state.written_tensors}
        written.pop("", None)  # no parameter
        return take_digests(self._named, written)

    def _note_assignment(self, module: nn.Module, name: str, frame: Frame) -> None:
        assigned = self._assigned.get((id(module), name))
        if assigned is not None:
            self._note(assigned, "assignment", frame)

    @hands_over
    def _handle_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Detects gradients that are removed or replaced: `p.grad = None` is no operation at the dispatcher."""
        if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is _GRAD:
            self._note_clearing("zero_grad", calling_frame())
        return func(*args, **kwargs)

    def _note_write(self, name: str, operation: str, frame: Frame) -> None:
        if name == _GRADIENT:
            self._note_clearing(operation, frame)
        else:
            self._note(name, operation, frame)

    def _note(self, name: str, operation: str, frame: Frame) -> None:
        self._writers[name] = (operation, frame)
        self.writes[name, operation, frame] += 1

    def _note_clearing(self, operation: str, frame: Frame) -> None:
        """Notes the first line that changes the gradients of earlier micro-batches."""
        if self.clearing is None and frame is not None and any(g is not None for g in self._read_gradients()):
            self.clearing = locate_operation(operation, frame)

    def _locate_writer(self, name: str) -> Operation | None:
        operation, frame = self._writers.get(name, ("", None))
        # Something besides BatchNorm reads these statistics in training, so that they are not only for evaluation.
        if "batch_norm" in operation and name in self._reads:
            operation, frame = "", None
        place = self._places[name]
        if place.module is None or place.kind == "closure":
            return locate_operation(operation, frame)
        return locate_operation(operation, frame, place.path, type(place.module).__name__)


@contextmanager
def watch_assignments(
    notice: Callable[[nn.Module, str, Frame], None], is_pinned: Callable[[nn.Module, str], bool] = lambda *_: False
) -> Iterator[None]:
    """Calls `notice` at every attribute assignment to a module, and drops those for which `is_pinned` is true."""
    original = nn.Module.__setattr__

    @hands_over
    def assign(module: nn.Module, name: str, value: Any) -> None:
        if is_pinned(module, name):
            return
        notice(module, name, calling_frame())
        original(module, name, value)

    try:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign, assignment]
        yield
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]
