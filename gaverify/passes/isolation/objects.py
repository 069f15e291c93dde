"""Saves and restores containers, objects, modules and iterators, where their state is that of the user's own code.

Entries are compared by identity, which never runs the user's `__eq__`. Nothing is written where nothing changed, so
that an iterator of the user's over a dictionary goes on.
"""

from __future__ import annotations

import array
import os
import sys
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from operator import is_
from types import FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from gaverify.passes.isolation.globals import foreign_generator_states, torch_generator_states
from gaverify.torch_internals import submodules_of, tree_leaves

# Whose code is it? State of the user's own code is followed, that of Python, torch and NumPy is not.


_LIBRARIES = frozenset({"torch", "torchgen", "functorch", "triton", "numpy"}) | sys.stdlib_module_names
# Objects of a library that hold what their user puts there, or that a step changes
_BAGS = (SimpleNamespace, UserDict, UserList, ChainMap)
_STATEFUL = ("torch.optim", "torch.amp", "torch.cuda.amp", "argparse")
_STANDARD = os.path.dirname(os.__file__) + os.sep


@cache
def is_library(module: str) -> bool:
    """Whether a module name belongs to Python's standard library, torch or NumPy."""
    return module.partition(".")[0] in _LIBRARIES


def module_of(kind: type) -> str:
    """Returns the name of the module that defines a class; empty for a class that hides it."""
    name = kind.__module__
    return name if isinstance(name, str) else ""


def has_own_state(kind: type) -> bool:
    """Whether the attributes of an object of this class are the user's state: not where a library defines the class."""
    module = module_of(kind)
    return not is_library(module) or kind in _BAGS or module.startswith(_STATEFUL)


def packages_of(callables: Iterable[Any]) -> frozenset[str]:
    """Returns the top-level packages that define some callables: a user's own package may be installed, too."""
    packages = set()
    for value in callables:
        while isinstance(value, partial):
            value = value.func
        module = getattr(value, "__module__", None)  # of a function, a method, or the class of an object
        if isinstance(module, str):
            packages.add(module.partition(".")[0])
    return frozenset(packages)


def is_users_function(function: FunctionType, user_packages: frozenset[str]) -> bool:
    """Whether the globals that a function names are the user's: not installed, or in one of `user_packages`."""
    name = function.__globals__.get("__name__")
    return _is_users(name if isinstance(name, str) else "", function.__code__.co_filename, user_packages)


def is_users_class(kind: type, user_packages: frozenset[str]) -> bool:
    """Whether the attributes of the class itself may be the user's state."""
    name = module_of(kind)
    return _is_users(name, getattr(sys.modules.get(name), "__file__", None) or "", user_packages)


def is_users_module(value: Any, user_packages: frozenset[str]) -> bool:
    """Whether `value` is an imported module of the user's own."""
    if type(value) is not ModuleType:
        return False
    return _is_users(value.__name__, getattr(value, "__file__", None) or "", user_packages)


@cache
def _is_users(module: str, filename: str, user_packages: frozenset[str]) -> bool:
    """An installed package keeps its state to itself; to follow all of them would cost more than it finds."""
    top = module.partition(".")[0]
    if top == "gaverify" or is_library(top):
        return False
    installed = "site-packages" in filename or "dist-packages" in filename or filename.startswith(_STANDARD)
    return top in user_packages or not installed


# Iterators and generators that the user's code keeps: their values are recorded, so that a pass can read them
# again.
#
# Python lets nobody copy or rewind a generator. While a verification runs, a stand-in takes the place of each
# iterator that the loss can reach; it repeats the recorded values after a restore and asks the iterator only for
# later ones.


# For each open verification: the stand-ins by the identity of their iterators, and what puts the iterators back
_scopes: list[tuple[dict[int, RewindableIterator], list[Callable[[], None]]]] = []


@contextmanager
def rewindable_iterators() -> Iterator[None]:
    """Lets stand-ins take the place of iterators until the end, when every iterator is put back where it was."""
    _scopes.append(({}, []))
    try:
        yield
    finally:
        for put_back in reversed(_scopes.pop()[1]):
            put_back()


class RewindableIterator:
    """Stands in for an iterator, and repeats its values after `position` was set back.

    Values that were drawn at random, or computed from weights, are of one pass: from the first of these on, nothing is
    recorded and nothing repeated.
    """

    __slots__ = ("_iterator", "_position", "_values")

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._values: list[Any] | None = []
        self._position = 0

    @property
    def position(self) -> int | None:
        """How many values have been read; None where they cannot be repeated."""
        return self._position if self._values is not None else None

    def rewind(self, position: int | None) -> None:
        """Lets the next value be the one after `position` values."""
        if position is not None and self._values is not None:
            self._position = min(position, len(self._values))

    def __iter__(self) -> RewindableIterator:
        return self

    def __next__(self) -> Any:
        values = self._values
        if values is None:
            return next(self._iterator)
        if self._position == len(values):
            before = _random_states()
            value = next(self._iterator)
            # A backward would go through such a value, and a second one would find its graph freed.
            is_computed = any(
                isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(value)
            )
            if is_computed or _random_states() != before:
                self._values = None
                return value
            values.append(value)
        self._position += 1
        return values[self._position - 1]

    def send(self, value: Any) -> Any:
        """Sends a value to a generator, whose answer may depend on it: from here on nothing is repeated."""
        if value is None:
            return next(self)
        self._values = None
        return self._iterator.send(value)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_iterator"), name)


def _random_states() -> tuple[Any, ...]:
    return (*torch_generator_states(), *foreign_generator_states())


def replace_iterators(places: Iterable[tuple[Any, Any]], bind: Callable[[Any, Any], None]) -> None:
    """Puts stand-ins in the place of iterators; does nothing outside a verification.

    Args:
        places: Places (names, cells, indices) and what is there.
        bind: Puts another value in a place.
    """
    if not _scopes:
        return
    stand_ins, put_back = _scopes[-1]
    for place, value in list(places):
        # A generator, or an iterator of Python's own: those of other classes have attributes, which are kept.
        if hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools"):
            # one stand-in for each iterator: two variables that share it go on together
            bind(place, stand_ins.setdefault(id(value), RewindableIterator(value)))
            put_back.append(partial(bind, place, value))


# Saves and restores containers, objects and modules: entries, attributes, slots, registries, attributes in C++.


Restore = Callable[[], None]
CONTAINERS = (dict, list, set, deque)
BYTES = (bytearray, array.array)
# A data set or a vocabulary is not what a forward changes. Containers with more entries are not copied at all; a copy
# of a million references takes 5 ms, and as long again to compare after each pass.
_COPIED = 2_000_000
_LOOKED_THROUGH = 1_000  # entries of a container that may be iterators
_COPIED_BYTES = 1 << 24  # the same bound for arrays, whose values have to be copied


def entries_of(value: Any, most: int, *, values: bool = False) -> list[Any]:
    """Returns the first entries of a container (a mapping's keys, or its `values`), whatever its class does."""
    base = _base(value)
    return list(islice(base.values(value) if values and isinstance(value, dict) else base.__iter__(value), most))


def _base(value: Any) -> Any:
    """The built-in class below a user's own, which may make something else of the same methods."""
    return next(kind for kind in (OrderedDict, dict, list, set, deque, tuple, frozenset) if isinstance(value, kind))


def are_same_objects(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two iterables of one length give the same objects in the same order."""
    return all(map(is_, one, other))


def keep_container(value: Any) -> tuple[Restore | None, list[Any]]:
    """Keeps the entries of a container; returns what puts them back, and the entries."""
    if len(value) > _COPIED:
        return None, []
    # An iterator in a container moves when it is read, and no copy of the container would bring it back.
    if len(value) <= _LOOKED_THROUGH and not isinstance(value, set):
        base = _base(value)
        places = base.items(value) if isinstance(value, dict) else enumerate(base.__iter__(value))
        replace_iterators(places, partial(base.__setitem__, value))
    if isinstance(value, dict):
        return _keep_mapping(value, _base(value))
    if isinstance(value, set):
        return _keep_set(value)
    return _keep_sequence(value, _base(value))


def _keep_mapping(value: dict[Any, Any], base: Any) -> tuple[Restore, list[Any]]:
    keys, entries = list(base.__iter__(value)), list(base.values(value))

    def restore() -> None:
        if len(value) == len(keys) and are_same_objects(base.__iter__(value), keys):
            if are_same_objects(base.values(value), entries):
                return
        else:
            base.clear(value)  # or the order would not come back
        for key, entry in zip(keys, entries, strict=True):
            base.__setitem__(value, key, entry)

    return restore, entries


def _keep_set(value: set[Any]) -> tuple[Restore, list[Any]]:
    elements = set(set.__iter__(value))

    def restore() -> None:
        if not set.__eq__(value, elements):
            set.clear(value)
            set.update(value, elements)

    return restore, list(elements)


def _keep_sequence(value: Any, base: Any) -> tuple[Restore, list[Any]]:
    elements = list(base.__iter__(value))

    def restore() -> None:
        if len(value) != len(elements) or not are_same_objects(base.__iter__(value), elements):
            base.clear(value)
            base.extend(value, elements)

    return restore, elements


def keep_bytes(value: Any) -> Restore | None:
    """Keeps the contents of a `bytearray` or an `array.array`."""
    if len(value) > _COPIED_BYTES:
        return None
    content = value[:]

    def restore() -> None:
        if value != content:
            value[:] = content

    return restore


def keep_ndarray(value: Any) -> tuple[Restore | None, list[Any]]:
    """Keeps the contents of a NumPy array that can be written to; the entries of an array of objects as well."""
    if not value.flags.writeable or value.nbytes > _COPIED_BYTES:
        return None, []
    content, objects = value.copy(), value.dtype.hasobject

    def restore() -> None:
        if value.shape != content.shape:
            # In place, although others may look at its memory: they look at the same array before and after.
            value.resize(content.shape, refcheck=False)
        value[...] = content

    return restore, content.ravel().tolist() if objects and value.dtype.names is None else []


def numpy_types() -> tuple[type, tuple[type, ...]]:
    """Returns NumPy's array class and its generator classes, where the user's code has imported it already."""
    numpy = sys.modules.get("numpy")
    ndarray = getattr(numpy, "ndarray", None)
    random = getattr(numpy, "random", None)
    names = ("Generator", "RandomState", "BitGenerator")
    generators = tuple(kind for name in names if isinstance(kind := getattr(random, name, None), type))
    return (ndarray if isinstance(ndarray, type) else _Absent), generators


class _Absent:
    """Stands for a class that is not there: nothing is an instance of it."""


UNSET = object()


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the `__dict__` of an object, past any `__getattr__` that pretends to have one."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def slots_of(value: Any) -> list[tuple[MemberDescriptorType, Any]]:
    """Returns the `__slots__` of an object's classes, and what they hold; `UNSET` for one that was never assigned."""
    return [
        (slot, read(slot, value))
        for kind in type(value).__mro__
        if "__slots__" in vars(kind) and not is_library(module_of(kind))  # extension types have read-only members
        for slot in vars(kind).values()
        if type(slot) is MemberDescriptorType
    ]


def read(slot: MemberDescriptorType, value: Any) -> Any:
    """Returns what a slot of an object holds, `UNSET` where it was never assigned."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return UNSET


def is_special(name: str) -> bool:
    """Whether Python itself keeps a class's attribute of this name."""
    return (name.startswith("__") and name.endswith("__")) or name.startswith("_abc_")


# Attributes that every `nn.Module` carries for its own bookkeeping; the user's state lies beside these.
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


def keep_submodules(module: nn.Module) -> Restore:
    """Takes away submodules that a forward added and gives back those that it removed, in their order.

    A submodule that was exchanged stays until `mode_set` closes, which says why.
    """
    registry = submodules_of(module)
    saved = dict(registry)

    def restore() -> None:
        # By names alone: a control run exchanges modules under a name on purpose.
        if list(registry) != list(saved):
            wanted = {name: registry.get(name, child) for name, child in saved.items()}
            registry.clear()
            registry.update(wanted)

    return restore


def empty_registries(module: nn.Module) -> list[Any]:
    """The registries that hold nothing yet, most of a dozen per module; the others are kept as any container is."""
    state = vars(module)
    return [
        state[name] for name in OWN_ATTRIBUTES - {"_modules"} if type(state.get(name)) in _EMPTY and not state[name]
    ]


_EMPTY = tuple({type(value) for value in vars(nn.Module()).values() if hasattr(value, "clear")})


def scripted_attributes(module: torch.jit.ScriptModule) -> dict[str, Any]:
    """Returns what a scripted or traced module keeps in C++; lists and dictionaries come as copies."""
    concrete = getattr(module, "_concrete_type", None)
    return {name: module._c.getattr(name) for name in concrete.get_attributes()} if concrete is not None else {}
