"""Saves and restores the state of functions: closures, defaults, the globals that they name, wrapped callables."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch import nn

from gaverify.passes.isolation.objects import (
    UNSET,
    attributes_of,
    is_special,
    is_users_class,
    is_users_function,
    is_users_module,
    packages_of,
    read,
    replace_iterators,
    slots_of,
)

Restore = Callable[[], None]
_DESCRIPTORS = (property, MemberDescriptorType, GetSetDescriptorType)
_CALLABLES = (FunctionType, MethodType, BuiltinMethodType, partial)
_FUNCTIONS = 200  # helper functions that are asked for the names of variables
# Where callables that are no functions of their own hold the function or the arguments that count: bound methods,
# `functools.partial`, `staticmethod`, `property`, `functools.cached_property`, whatever `functools.wraps` has touched.
_INSIDE = ("__self__", "__func__", "__wrapped__", "func", "args", "keywords", "fget", "fset")


@dataclass(frozen=True)
class Variable:
    """A name that code binds to values."""

    read: Callable[[], Any]
    """Returns its value now; `UNSET` where it has none."""
    bind: Callable[[Any], object]
    """Binds it to another value."""
    unbind: Callable[[], object]
    """Takes its value away."""

    def get(self) -> Any:
        """Returns its value now; None where it has none."""
        value = self.read()
        return None if value is UNSET else value

    def keep(self) -> Restore:
        """Returns what binds it again to its value of now."""
        saved = self.read()

        def restore() -> None:
            # By identity: comparing values would run the user's `__eq__`.
            if self.read() is saved:
                return
            if saved is UNSET:
                self.unbind()
            else:
                self.bind(saved)

        return restore


def entry_of(values: MutableMapping[Any, Any], key: Any) -> Variable:
    """Returns an entry of a mapping: a global, an attribute, a buffer."""
    return Variable(lambda: values.get(key, UNSET), partial(values.__setitem__, key), lambda: values.pop(key, None))


def _enclosed(cell: CellType) -> Variable:
    return Variable(
        lambda: contents_of(cell, UNSET),
        partial(setattr, cell, "cell_contents"),
        partial(delattr, cell, "cell_contents"),
    )


def _slot_of(value: Any, slot: MemberDescriptorType) -> Variable:
    return Variable(lambda: read(slot, value), partial(slot.__set__, value), partial(slot.__delete__, value))


def _class_attribute(kind: type, name: str) -> Variable:
    return Variable(
        lambda: vars(kind).get(name, UNSET),
        partial(type.__setattr__, kind, name),
        partial(type.__delattr__, kind, name),
    )


def _constant(value: Any) -> Variable:
    """What no code binds again: only what the value holds may change."""
    return Variable(lambda: value, lambda _: None, lambda: None)


def wrapped_by(value: Any) -> list[Any]:
    """Returns what a callable object of the standard library wraps."""
    if isinstance(value, partial):
        replace_iterators(enumerate(value.args), partial(_set_argument, value))
    return [entry for name in _INSIDE if (entry := getattr(value, name, None)) is not None]


def names_in(code: CodeType) -> set[str]:
    """Returns the globals and attributes that code names, in the functions inside it as well."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # A function defined inside another is a constant of its code.
            names |= names_in(constant)
    return names


def globals_written_in(code: CodeType) -> set[str]:
    """Returns the globals that code binds itself (`global step`), in the functions inside it as well."""
    names = {str(each.argval) for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= globals_written_in(constant)
    return names


def namespaces(function: FunctionType, user_packages: frozenset[str]) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Yields where a user's function looks names up: its globals, and user modules among them (`state.step += 1`)."""
    if not is_users_function(function, user_packages):
        return
    names, visited, waiting = names_in(function.__code__), set[int](), [function.__globals__]
    while waiting:
        namespace = waiting.pop()
        if id(namespace) in visited:
            continue
        visited.add(id(namespace))
        yield namespace, names
        # A function that names a module reads its attributes by names that stand in the same code.
        waiting += [vars(value) for name in names if is_users_module(value := namespace.get(name), user_packages)]


def contents_of(cell: CellType, default: Any = None) -> Any:
    """Returns what a variable of an enclosing function holds; `default` where it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def _set_default(function: FunctionType, index: int, value: Any) -> None:
    values = list(function.__defaults__ or ())
    values[index] = value
    function.__defaults__ = tuple(values)


def _set_argument(wrapper: partial[Any], index: int, value: Any) -> None:
    values = list(wrapper.args)
    values[index] = value
    # The arguments of a `partial` are read-only; pickling's own way in is the only one.
    wrapper.__setstate__((wrapper.func, tuple(values), wrapper.keywords, vars(wrapper)))  # type: ignore[attr-defined]


def keep_function(function: FunctionType) -> tuple[Restore, list[Any]]:
    """Keeps the variables that a function encloses; returns its defaults and attributes among what to follow.

    Not the globals, which functions share: see `Globals`.
    """
    closure = function.__closure__ or ()
    places = ((cell, contents_of(cell)) for cell in closure)
    replace_iterators(places, lambda cell, value: setattr(cell, "cell_contents", value))
    replace_iterators(enumerate(function.__defaults__ or ()), partial(_set_default, function))
    restorers = [_enclosed(cell).keep() for cell in closure]

    def restore() -> None:
        for put_back in restorers:
            put_back()

    cell_values = [value for cell in closure if (value := contents_of(cell, UNSET)) is not UNSET]
    return restore, [*cell_values, *(function.__defaults__ or ()), function.__kwdefaults__, vars(function)]


def variables(*callables: Any) -> Iterator[tuple[str, Variable]]:
    """Yields by name what callables keep between calls, helper functions that they call included.

    Variables of enclosing functions, defaults, arguments of a `partial`, attributes of an owner (unless that is a
    module, which has names of its own) and of its class, globals that a function names.
    The first callable's package counts as the user's own.
    """
    waiting, visited, user_packages = list(callables), set[int](), packages_of(callables[:1])
    while waiting and len(visited) < _FUNCTIONS:
        current = waiting.pop(0)
        if id(current) in visited:
            continue
        visited.add(id(current))
        for name, variable in _variables_of(current, user_packages):
            value = variable.get()
            if issubclass(type(value), (*_CALLABLES, type)):
                waiting.append(value)
            elif not issubclass(type(value), ModuleType):
                yield name, variable


def _variables_of(value: Any, user_packages: frozenset[str]) -> Iterator[tuple[str, Variable]]:
    if isinstance(value, FunctionType):
        yield from _variables_of_function(value, user_packages)
    elif isinstance(value, MethodType):
        yield "__func__", _constant(value.__func__)
        yield from _variables_of(value.__self__, user_packages)
    elif isinstance(value, BuiltinMethodType):
        yield value.__name__, _constant(value.__self__)
    elif isinstance(value, partial):
        yield from ((name, entry_of(vars(value), name)) for name in vars(value))
        yield "func", _constant(value.func)
        yield from ((f"args[{i}]", _constant(argument)) for i, argument in enumerate(value.args))
        yield from ((name, entry_of(value.keywords, name)) for name in value.keywords)
    elif isinstance(value, type):  # a function names a class that keeps something
        yield from _variables_of_class(value, user_packages)
    else:
        yield from _variables_of_class(type(value), user_packages)
        attributes = {} if isinstance(value, nn.Module) else attributes_of(value) or {}
        yield from ((name, entry_of(attributes, name)) for name in list(attributes))
        yield from ((slot.__name__, _slot_of(value, slot)) for slot, _ in slots_of(value))


def _variables_of_class(kind: type, user_packages: frozenset[str]) -> Iterator[tuple[str, Variable]]:
    """The functions of a user's classes, so that their globals are found, and what the classes hold themselves."""
    for base in (base for base in kind.__mro__ if is_users_class(base, user_packages)):
        for name, value in list(vars(base).items()):
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, FunctionType) or not (is_special(name) or type(value) in _DESCRIPTORS):
                yield f"{base.__name__}.{name}", _class_attribute(base, name)


def _variables_of_function(function: FunctionType, user_packages: frozenset[str]) -> Iterator[tuple[str, Variable]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, _enclosed(cell)
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    for name, value in zip(positional[code.co_argcount - len(defaults) :], defaults, strict=True):
        yield name, _constant(value)
    for name, value in (function.__kwdefaults__ or {}).items():
        yield name, _constant(value)
    for name in vars(function):
        yield f"{function.__name__}.{name}", entry_of(vars(function), name)
    for namespace, names in namespaces(function, user_packages):
        written = globals_written_in(code) if namespace is function.__globals__ else set()  # also where not there yet
        for name in sorted((names & namespace.keys()) | written):
            yield name, entry_of(namespace, name)


class Globals:
    """The names in one namespace that some function mentions: rebound, deleted or made anew by a forward."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._kept: dict[str, Any] = {}

    def add(self, names: Iterable[str]) -> list[Any]:
        """Keeps more names, and returns what they are bound to."""
        places = ((name, self._namespace.get(name)) for name in names if name not in self._kept)
        replace_iterators(places, self._namespace.__setitem__)
        new = {name: self._namespace.get(name, UNSET) for name in names if name not in self._kept}
        self._kept |= new
        return [value for value in new.values() if value is not UNSET]

    def restore(self) -> None:
        """Binds every name to what it was bound to."""
        for name, value in self._kept.items():
            now = self._namespace.get(name, UNSET)
            if now is value:
                continue
            if value is not UNSET:
                self._namespace[name] = value
            # A name that was not bound before is taken away again.
            elif not isinstance(now, ModuleType):  # an import inside the forward is no state
                del self._namespace[name]
