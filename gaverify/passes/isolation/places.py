"""Where state lies: `Holder` binds names to values, and `StatePlace` is one of its names.

Whoever looks at state reads this one list. A walk keeps whole holders, nameless and cheap (`walk`); the questions of
the search, and audits, ask for places by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, partialmethod
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from gaverify.passes.isolation.objects import (
    OWN_ATTRIBUTES,
    UNSET,
    are_same_objects,
    attributes_of,
    is_library,
    is_special,
    is_users_class,
    is_users_function,
    is_users_module,
    module_of,
    packages_of,
    read,
    replace_iterators,
    scripted_attributes,
    slots_of,
)
from gaverify.records.events import ValuePlace
from gaverify.torch_internals import buffers_of, parameters_of

Restore = Callable[[], None]
Value = TypeVar("Value")
WRAPPERS = (
    MethodType,
    BuiltinMethodType,
    partial,
    partialmethod,
    cached_property,
    type(lru_cache(len)),
    staticmethod,
    classmethod,
    property,
)
# Where callables that are no functions of their own hold the function or the arguments that count: bound methods,
# `functools.partial`, `staticmethod`, `property`, `functools.cached_property`, whatever `functools.wraps` has touched.
_INSIDE = ("__self__", "__func__", "__wrapped__", "func", "fget", "fset")
_FUNCTIONS = 200  # helper functions that are asked for the names of variables


class Holder:
    """An object that binds names to values."""

    grows = False
    """Whether code may add names to it."""

    def read(self) -> Mapping[Any, Any]:
        """Returns what each name is bound to; `UNSET` where to nothing."""
        raise NotImplementedError

    def bind(self, key: Any, value: Any) -> None:
        """Binds a name to another value; does nothing where no code could do that."""

    def unbind(self, key: Any) -> None:
        """Takes the value of a name away."""

    def get(self, key: Any) -> Any:
        """Returns what one name is bound to."""
        return self.read().get(key, UNSET)

    def word(self, key: Any) -> str:
        """Returns how a name is written."""
        return str(key)

    def put(self, key: Any, value: Any) -> None:
        """Binds a name to a value that it had before."""
        # By identity: comparing values would run the user's `__eq__`.
        if self.get(key) is value:
            return
        if value is UNSET:
            self.unbind(key)
        else:
            self.bind(key, value)

    def keep(self) -> tuple[Restore, list[Any]]:
        """Keeps what all names are bound to; returns what binds them again, and the values."""
        replace_iterators(self.read().items(), self.bind)
        saved = dict(self.read())
        names, values = list(saved), list(saved.values())

        def restore() -> None:
            now = self.read()
            # names first: the comparison of values asks for as many of them
            if list(now) == names and are_same_objects(now.values(), values):
                return
            for key in [key for key in now if key not in saved]:
                self.unbind(key)
            for key, value in saved.items():
                self.put(key, value)

        return restore, values


class Entries(Holder):
    """A dictionary: attributes, keyword defaults, a registry of a module.

    Args:
        entries: The dictionary itself.
        prefix: Stands before the names.
    """

    grows = True

    def __init__(self, entries: MutableMapping[Any, Any], prefix: str = "") -> None:
        self._entries, self._prefix = entries, prefix

    def read(self) -> Mapping[Any, Any]:
        """Returns the dictionary."""
        return self._entries

    def bind(self, key: Any, value: Any) -> None:
        """Sets an entry."""
        self._entries[key] = value

    def unbind(self, key: Any) -> None:
        """Removes an entry."""
        self._entries.pop(key, None)

    def word(self, key: Any) -> str:
        """Returns the key behind the prefix."""
        return f"{self._prefix}{key}"


class ModuleParameters(Entries):
    """The parameters of a module: their values, which are written in place."""

    def get(self, key: Any) -> Any:
        """Returns the values."""
        return self._entries[key].data if key in self._entries else UNSET

    def bind(self, key: Any, value: Any) -> None:
        """Gives a parameter its memory back."""
        self._entries[key].data = value


class Slots(Holder):
    """The `__slots__` of an object; its names are the descriptors, because classes may use one name twice."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def read(self) -> Mapping[Any, Any]:
        """Returns what the slots hold."""
        return dict(slots_of(self._value))

    def get(self, key: MemberDescriptorType) -> Any:
        """Returns what a slot holds."""
        return read(key, self._value)

    def bind(self, key: MemberDescriptorType, value: Any) -> None:
        """Sets a slot through its descriptor, past the `__setattr__` of a frozen dataclass and past properties."""
        key.__set__(self._value, value)

    def unbind(self, key: MemberDescriptorType) -> None:
        """Empties a slot."""
        key.__delete__(self._value)

    def word(self, key: MemberDescriptorType) -> str:
        """Returns the name of a slot."""
        return key.__name__


class Scripted(Holder):
    """The state that a scripted module keeps in C++: numbers, lists, buffers, its mode.

    Lists and dictionaries come as copies.
    """

    def __init__(self, module: torch.jit.ScriptModule, names: Iterable[str]) -> None:
        self._module, self._names = module, tuple(names)

    def read(self) -> Mapping[str, Any]:
        """Returns the values."""
        return {name: self.get(name) for name in self._names}

    def get(self, key: str) -> Any:
        """Returns a value, which C++ may make anew for each call."""
        return getattr(self._module, key, UNSET)

    def bind(self, key: str, value: Any) -> None:
        """Sets a value."""
        self._module._c.setattr(key, value)


class Cells(Holder):
    """The variables that a function encloses."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read(self) -> Mapping[str, Any]:
        """Returns the values."""
        return {name: contents_of(cell, UNSET) for name, cell in self._cells.items()}

    def bind(self, key: str, value: Any) -> None:
        """Assigns a variable."""
        self._cells[key].cell_contents = value

    def unbind(self, key: str) -> None:
        """Makes a variable one that is not assigned yet."""
        del self._cells[key].cell_contents


class Defaults(Holder):
    """The defaults of a function's positional parameters."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function

    def read(self) -> Mapping[str, Any]:
        """Returns the defaults by the names of their parameters."""
        code, values = self._function.__code__, self._function.__defaults__ or ()
        return dict(zip(code.co_varnames[code.co_argcount - len(values) : code.co_argcount], values, strict=True))

    def bind(self, key: str, value: Any) -> None:
        """Exchanges a default."""
        self._function.__defaults__ = tuple((dict(self.read()) | {key: value}).values())


class Arguments(Holder):
    """The positional arguments of a `functools.partial`."""

    def __init__(self, wrapper: partial[Any]) -> None:
        self._wrapper = wrapper

    def read(self) -> Mapping[str, Any]:
        """Returns the arguments."""
        return {f"args[{i}]": argument for i, argument in enumerate(self._wrapper.args)}

    def bind(self, key: str, value: Any) -> None:
        """Exchanges an argument."""
        wrapper, arguments = self._wrapper, tuple((dict(self.read()) | {key: value}).values())
        # The arguments of a `partial` are read-only; pickling's own way in is the only one.
        wrapper.__setstate__((wrapper.func, arguments, wrapper.keywords, vars(wrapper)))  # type: ignore[attr-defined]


class Constants(Holder):
    """Names that no code binds again: only the contents of their values may change."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def read(self) -> Mapping[str, Any]:
        """Returns the values."""
        return self._values


class ClassAttributes(Holder):
    """The attributes of a class (`Model.calls += 1`), without those that Python itself keeps there."""

    grows = True

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def read(self) -> Mapping[str, Any]:
        """Returns the attributes; a special method is one of them, because it may use globals."""
        entries = vars(self.kind).items()
        return {name: value for name, value in entries if type(value) is FunctionType or not is_special(name)}

    def bind(self, key: str, value: Any) -> None:
        """Sets an attribute, past a metaclass."""
        type.__setattr__(self.kind, key, value)

    def unbind(self, key: str) -> None:
        """Removes an attribute."""
        type.__delattr__(self.kind, key)

    def word(self, key: str) -> str:
        """Returns the name with its class."""
        return f"{self.kind.__name__}.{key}"


class Globals(Holder):
    """The names in a namespace that some function mentions: rebound, deleted or made anew by a forward."""

    def __init__(self, namespace: dict[str, Any], names: set[str]) -> None:
        self.namespace, self.names = namespace, names

    def read(self) -> Mapping[str, Any]:
        """Returns what the names are bound to."""
        return {name: self.namespace.get(name, UNSET) for name in self.names}

    def get(self, key: str) -> Any:
        """Returns what a name is bound to."""
        return self.namespace.get(key, UNSET)

    def bind(self, key: str, value: Any) -> None:
        """Binds a name."""
        self.namespace[key] = value

    def unbind(self, key: str) -> None:
        """Takes a name away that was not bound before."""
        # An import inside the forward is no state.
        if not isinstance(self.namespace.get(key), ModuleType):
            self.namespace.pop(key, None)


@dataclass(frozen=True)
class StatePlace:
    """A name that is bound to state."""

    holder: Holder
    """The object that binds it."""
    key: Any
    """Its name there."""
    name: str
    """How it is written: `path.to.buffer`, `path.to.attribute`, or a variable's name."""
    kind: ValuePlace = "closure"
    """How it is held."""
    module: nn.Module | None = None
    """The module that holds it; None for what no module holds."""
    path: str = ""
    """The path of that module in the model."""

    @property
    def attribute(self) -> tuple[int, str]:
        """Tells the module and the name that an assignment to this place uses."""
        return id(self.module), self.holder.word(self.key)

    @property
    def bound(self) -> Any:
        """The object that is bound here: a parameter itself, not only its values."""
        return self.holder.read().get(self.key)

    def get(self) -> Any:
        """Returns its value now; None where it has none."""
        value = self.holder.get(self.key)
        return None if value is UNSET else value

    def keep(self) -> Restore:
        """Returns what binds it again to its value of now."""
        return partial(self.holder.put, self.key, self.holder.get(self.key))


def names_in(code: CodeType) -> set[str]:
    """Returns the globals and attributes that code names, in the functions inside it as well."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # A function defined inside another is a constant of its code.
            names |= names_in(constant)
    return names


def _globals_of(function: FunctionType, user_packages: frozenset[str]) -> Iterator[Globals]:
    """Yields where a user's function looks names up: its globals, and user modules among them (`state.step += 1`)."""
    if not is_users_function(function, user_packages):
        return
    names, visited, waiting = names_in(function.__code__), set[int](), [function.__globals__]
    while waiting:
        namespace = waiting.pop()
        if id(namespace) in visited:
            continue
        visited.add(id(namespace))
        yield Globals(namespace, names)
        # A function that names a module reads its attributes by names that stand in the same code.
        waiting += [vars(value) for name in names if is_users_module(value := namespace.get(name), user_packages)]


def contents_of(cell: CellType, default: Any = None) -> Any:
    """Returns what a variable of an enclosing function holds; `default` where it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def holders_of(value: Any, user_packages: frozenset[str]) -> Iterator[Holder]:
    """Yields what binds names to values in a function, a class, a wrapper of a function, or any other object."""
    kind = type(value)
    if kind is FunctionType:
        yield from (Cells(value), Defaults(value))
        if value.__kwdefaults__:
            yield Entries(value.__kwdefaults__)
        yield Entries(vars(value), f"{value.__name__}.")
        yield from _globals_of(value, user_packages)
    elif issubclass(kind, type):
        # A library's class is shared by everything that uses it: putting it back would undo what others did.
        yield from (ClassAttributes(base) for base in value.__mro__ if is_users_class(base, user_packages))
    else:
        if kind is BuiltinMethodType:
            yield Constants({value.__name__: value.__self__})
        elif issubclass(kind, WRAPPERS):
            yield Constants({name: inside for name in _INSIDE if (inside := getattr(value, name, None)) is not None})
        if issubclass(kind, partial):
            yield from (Arguments(value), Entries(value.keywords))
        attributes = attributes_of(value)
        if attributes is not None:
            yield Entries(attributes)
        yield Slots(value)


def variables(*callables: Any) -> Iterator[StatePlace]:
    """Yields by name what callables keep between calls, helper functions that they call included.

    Variables of enclosing functions, defaults, arguments of a `partial`, attributes of an owner (unless that is a
    module, which has names of its own) and of its class, globals that a function names.
    The first callable's package counts as the user's own.
    """
    waiting, visited, user_packages = deque(callables), set[int](), packages_of(callables[:1])
    unbound: list[StatePlace] = []
    while waiting and len(visited) < _FUNCTIONS:
        current = waiting.popleft()
        if id(current) in visited:
            continue
        visited.add(id(current))
        is_module, is_method = issubclass(type(current), nn.Module), type(current) is MethodType
        for holder in holders_of(current, user_packages):
            for key in () if is_module and isinstance(holder, Entries) else list(holder.read()):
                value, name = holder.get(key), holder.word(key)
                if value is UNSET:
                    unbound.append(StatePlace(holder, key, name))
                elif issubclass(type(value), (FunctionType, *WRAPPERS, type)) or (is_method and key == "__self__"):
                    waiting.append(value)
                # what `functools.wraps` copies, as `__doc__`
                elif not (issubclass(type(value), ModuleType) or (is_special(name) and not callable(value))):
                    yield StatePlace(holder, key, name)
                    if not is_library(module_of(type(value))):
                        # an object may count in its class, or in a global that a method names
                        waiting.append(type(value))
        waiting.append(type(current))
    yield from unbound  # last, because a name may be unbound in one namespace and bound in another


def places_of_module(root: nn.Module, prefix: str = "") -> Iterator[StatePlace]:
    """Yields what a module and those inside it hold: parameters, buffers, and attributes that are the user's."""
    for path, module in root.named_modules():
        parameters = [name for name, parameter in parameters_of(module).items() if parameter is not None]
        holders: tuple[tuple[ValuePlace, Holder, Iterable[Any]], ...]
        if isinstance(module, torch.jit.ScriptModule):
            # Its registries are views that can neither be iterated over directly nor asked with `get`.
            buffers = [name for name, _ in buffers_of(module).items()]
            inside = Scripted(module, scripted_attributes(module))
            plain = [name for name in inside.read() if name not in (*parameters, *buffers)]
            holders = (("parameter", inside, parameters), ("buffer", inside, buffers), ("attribute", inside, plain))
        else:
            registered, buffered, slots = ModuleParameters(parameters_of(module)), buffers_of(module), Slots(module)
            holders = (
                ("parameter", registered, parameters),
                ("buffer", Entries(buffered), buffered),
                ("attribute", slots, slots.read()),
            )
        attributes = ("attribute", Entries(vars(module)), vars(module))
        start = prefix + (f"{path}." if path else "")
        for kind, holder, keys in (*holders, attributes):
            for key in [key for key in keys if key not in OWN_ATTRIBUTES]:
                yield StatePlace(holder, key, start + holder.word(key), kind, module, start[:-1])


def merge_names(groups: Iterable[Iterable[tuple[str, Value]]]) -> dict[str, Value]:
    """Returns what has a name in the model, then in the loss, which may use a name of the model's."""
    named: dict[str, Value] = {}
    for group in groups:
        taken = frozenset(named)
        for name, value in group:
            named.setdefault(f"loss.{name}" if name in taken else name, value)
    return named
