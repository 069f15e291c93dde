"""`ModelState`: the state that the user's code can reach and a forward may change, saved once, restored many times.

The search starts at the model and the loss function. It follows closures, defaults, globals, helper functions,
attributes and containers. The nearest objects come first and their number is bounded: a forward changes objects near
it, and a configuration tree or a data set on some attribute must not make a verification slow.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gaverify.errors import InternalError
from gaverify.passes.isolation import globals, objects
from gaverify.passes.isolation.globals import ARITHMETIC, check_initialised, flag_states
from gaverify.passes.isolation.objects import RewindableIterator, packages_of
from gaverify.passes.isolation.places import (
    WRAPPERS,
    ClassAttributes,
    Entries,
    Globals,
    Holder,
    Restore,
    Scripted,
    Slots,
    StatePlace,
    holders_of,
)
from gaverify.passes.isolation.tensors import Tensors
from gaverify.torch_internals import buffers_of, parameters_of, submodules_of, without_torch_function

_OBJECTS = 20_000  # objects that are looked at in all, modules and their tensors not counted: some 0.1 s
_ENTRIES = 1_000  # of one container; more are a data set or a vocabulary: kept as they are, but not followed
CANNOT_CHANGE = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    type(...),
    type(NotImplemented),
    range,
    slice,
    Enum,
    ModuleType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
Children = Iterable[Any]


class StateWalk:
    """One search for state, breadth first.

    Args:
        tensors: Saves every tensor that is found.
        without_gradients: Identities of the parameters whose `.grad` belongs to the passes.
        user_packages: Packages that are the user's although they are installed.
    """

    def __init__(self, tensors: Tensors, without_gradients: frozenset[int], user_packages: frozenset[str]) -> None:
        self._restorers: list[Restore] = []
        self._tensors, self._without_gradients, self._user_packages = tensors, without_gradients, user_packages
        self._empty: list[Any] = []  # dictionaries and registries that hold nothing yet
        self._global_names: dict[int, set[str]] = {}  # of each namespace, those that are kept
        self._seen: dict[int, Any] = {}  # holds what it has seen, so that no identity is used twice
        self._waiting: deque[Any] = deque()
        self._handlers: dict[type, Callable[[Any], Children] | None] = {}
        self._ndarray, self._numpy_generators = objects.numpy_types()
        self._objects_left = _OBJECTS

    @property
    def restorers(self) -> list[Restore]:
        """Puts everything back but the values of tensors."""
        return [self._clear_empty, *self._restorers]

    def _clear_empty(self) -> None:
        """Takes away what a forward has registered where nothing was: a hook, a parameter, an attribute of a tensor."""
        for entries in self._empty:
            if entries:
                entries.clear()

    def follow(self, values: Children) -> None:
        """Keeps `values` and what can be reached from them."""
        self._search(values)
        self._handlers.clear()  # bound methods: a cycle would keep all copies until the next garbage collection

    def _search(self, values: Children) -> None:
        self._wait_for(values)
        while self._waiting and self._objects_left > 0:
            value = self._waiting.popleft()
            if id(value) not in self._seen:
                # Nearest first: where the bound is reached, what is left out lies far from the loss.
                self._objects_left -= not issubclass(type(value), nn.Module)
                self._visit(value)

    def _visit(self, value: Any) -> None:
        self._seen[id(value)] = value
        handler = self._handler(type(value))
        if handler is not None:
            self._wait_for(handler(value))

    def _wait_for(self, values: Children) -> None:
        handlers = self._handlers
        for value in values:
            kind = type(value)
            # asked here before the call: most values are numbers of modules
            if (handlers[kind] if kind in handlers else self._handler(kind)) is not None:
                self._waiting.append(value)

    def _handler(self, kind: type) -> Callable[[Any], Children] | None:
        if kind not in self._handlers:
            self._handlers[kind] = self._handler_for(kind)
        return self._handlers[kind]

    def _handler_for(self, kind: type) -> Callable[[Any], Children] | None:
        for kinds, handler in (
            (CANNOT_CHANGE, None),
            (torch.Tensor, self._tensor),
            (nn.Module, self._module),
            (torch.Generator, self._torch_generator),
            (RewindableIterator, self._iterator),
            ((random.Random, *self._numpy_generators), self._generator),
            (objects.CONTAINERS, self._container),
            (objects.BYTES, self._bytes),
            (self._ndarray, self._array),
            ((tuple, frozenset), self._walk_tuple),
            ((FunctionType, *WRAPPERS, type), self._object),
        ):
            if issubclass(kind, kinds):  # not `isinstance`, which a proxy object may answer as it likes
                return handler
        return self._object if objects.has_own_state(kind) else None

    def _add(self, restore: Restore | None) -> None:
        if restore is not None:
            self._restorers.append(restore)

    def _tensor(self, tensor: torch.Tensor, *, buffer: bool = False) -> Children:
        if is_lazy(tensor):
            return ()
        gradient = id(tensor) not in self._without_gradients
        self._tensors.keep(tensor, wait=not buffer, gradient=gradient)
        attributes = vars(tensor)
        if not attributes:
            self._empty.append(attributes)
        return [*(self._keep(Entries(attributes)) if attributes else ()), *self._hooks(tensor)]

    def _hooks(self, tensor: torch.Tensor) -> Children:
        """The hooks of a leaf; a forward that registers one more at each call would leave them behind."""
        if not (tensor.is_leaf and tensor.requires_grad):
            return
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, name, None)
            if hooks is None:
                self._add(lambda name=name: (getattr(tensor, name, None) or {}).clear())  # type: ignore[misc]
            yield hooks

    def _module(self, module: nn.Module) -> Children:
        """Every submodule at once, so that the bound on objects does not count them."""
        submodules = list(submodules_of(module).values())
        tensors = [*parameters_of(module).values(), *buffers_of(module).values()]
        if isinstance(module, torch.jit.ScriptModule):  # whose registries are views that take no update
            # A scripted module keeps its tensors in C++; `vars` shows none of them.
            inside = self._keep(Scripted(module, objects.scripted_attributes(module)))
            tensors += [value for value in inside if isinstance(value, torch.Tensor)]
        else:
            empty = objects.empty_registries(module)
            # The registries are kept in ways of their own: walked as containers they would be copied for each module.
            self._seen |= {id(registry): registry for registry in (submodules_of(module), *empty)}
            self._add(objects.keep_submodules(module))
            self._empty += empty
        values = self._keep(Entries(vars(module)))
        kind = self._kind(module)
        if kind:
            values += self._keep(Slots(module))
        for tensor in tensors:
            if tensor is not None and id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                # A buffer is copied at once: BatchNorm's kernel writes to it without an operation that could be seen.
                self._wait_for(self._tensor(tensor, buffer=True))
        for child in submodules:
            if child is not None and id(child) not in self._seen:
                self._visit(child)
        return [*kind, *values]

    def _torch_generator(self, generator: torch.Generator) -> Children:
        self._add(globals.restorer(generator))
        return ()

    def _generator(self, generator: Any) -> Children:
        if not isinstance(generator, random.SystemRandom):  # which has no state
            self._add(globals.restorer(generator))
            globals.register_generator(generator)
        return self._object(generator)

    def _iterator(self, iterator: RewindableIterator) -> Children:
        self._add(partial(iterator.rewind, iterator.position))
        return ()

    def _container(self, value: Any) -> Children:
        restore, entries = objects.keep_container(value)
        self._add(restore)
        return [*self._entries(entries), *self._object(value)]

    def _bytes(self, value: Any) -> Children:
        self._add(objects.keep_bytes(value))
        return self._object(value)

    def _array(self, value: Any) -> Children:
        restore, entries = objects.keep_ndarray(value)
        self._add(restore)
        return self._entries(entries)

    def _entries(self, value: Any) -> Children:
        return value if len(value) <= _ENTRIES else ()

    def _walk_tuple(self, value: Any) -> Children:
        """The entries of a tuple; a subclass may count and iterate otherwise, or refuse to."""
        return self._entries(objects.entries_of(value, _ENTRIES + 1))

    def _object(self, value: Any) -> Children:
        """Values that an object binds itself; where it is a container too, only a subclass has any attributes."""
        children = [*self._kind(value)]
        for holder in holders_of(value, self._user_packages):
            if isinstance(holder, ClassAttributes) and holder.kind is not value:
                if id(holder.kind) in self._seen:
                    continue
                self._seen[id(holder.kind)] = holder.kind
            if isinstance(holder, Globals):
                visited_names = self._global_names.setdefault(id(holder.namespace), set())
                holder = Globals(holder.namespace, holder.names - visited_names)
                visited_names |= holder.names
            children += self._keep(holder)
        return children

    def _keep(self, holder: Holder) -> list[Any]:
        restore, values = holder.keep()
        if values or holder.grows:
            self._restorers.append(restore)
        return values

    def _kind(self, value: Any) -> Children:
        kind = type(value)
        return () if objects.is_library(objects.module_of(kind)) or id(kind) in self._seen else (kind,)


class ValueWalk(StateWalk):
    """A search for what some values hold themselves: no modules, functions and classes, whose state has other names."""

    def _handler_for(self, kind: type) -> Callable[[Any], Children] | None:
        handled_elsewhere = (nn.Module, nn.Parameter, FunctionType, *WRAPPERS, type, torch.Generator, random.Random)
        if issubclass(kind, (*handled_elsewhere, *self._numpy_generators)):
            return None
        return super()._handler_for(kind)

    def _kind(self, value: Any) -> Children:
        return ()


class ModelState:
    """The values that a forward may change, taken once and restorable any number of times.

    Buffers, attributes and what the loss function can reach are copied; parameters and other large tensors only when
    something is about to write to them (`before_write`, called from the dispatcher).

    Args:
        modules: The model, and the loss where it is a module.
        others: Code that the forward runs outside of modules: the loss function.

    Raises:
        ProblemError: A lazy module has no parameters yet.
    """

    def __init__(self, modules: list[nn.Module], others: tuple[Any, ...] = ()) -> None:
        registered = [tensor for root in modules for tensor in (*root.parameters(), *root.buffers())]
        check_initialised(registered)
        self._flags = flag_states(ARITHMETIC)  # not those of kernels, which a pass sets for itself
        self._tensors = Tensors()
        self._walk = StateWalk(self._tensors, frozenset(map(id, registered)), packages_of(others))
        with torch.no_grad(), without_torch_function():
            self._walk.follow([*modules, *others])

    @property
    def written_tensors(self) -> tuple[torch.Tensor, ...]:
        """The parameters, and the large tensors, that some pass has written to."""
        return self._tensors.written_tensors

    def before_write(self, tensor: torch.Tensor) -> None:
        """Keeps the values of parameters that share storage with `tensor`, if there are any, before they change."""
        self._tensors.before_write(tensor)

    def forget(self) -> None:
        """Drops every saved value: `restore` does nothing afterwards, and the memory can be freed."""
        self._tensors = Tensors()
        self._walk = StateWalk(self._tensors, frozenset(), frozenset())

    def restore(self) -> None:
        """Puts every value back, in place, so that ties and outside references survive.

        Raises:
            InternalError: Something could not be put back; everything else has been all the same.
        """
        failure: Exception | None = None
        with torch.no_grad(), without_torch_function():
            for restore in (self._flags, *self._walk.restorers, *self._tensors.restorers):
                try:
                    restore()
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise InternalError(f"state could not be put back: {type(failure).__name__}: {failure}") from failure


def keep_places(places: Sequence[StatePlace]) -> Restore:
    """Returns what puts back the values that some places have now, and nothing else."""
    tensors = Tensors(waits=False)
    walk = ValueWalk(tensors, frozenset(), frozenset())
    with torch.no_grad(), without_torch_function():
        bindings = [place.keep() for place in places]
        walk.follow([place.get() for place in places])

    def restore() -> None:
        with torch.no_grad(), without_torch_function():
            for put_back in (*bindings, *walk.restorers, *tensors.restorers):
                put_back()

    return restore
