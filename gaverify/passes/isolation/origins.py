"""Whose code is it? State of the user's own code is followed, that of Python, torch and NumPy is not."""

from __future__ import annotations

import os
import sys
from collections import ChainMap, UserDict, UserList
from collections.abc import Iterable
from functools import cache, partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

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
