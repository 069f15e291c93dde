"""Whose code is it? What the user wrote is followed; Python, torch and NumPy are not."""

from __future__ import annotations

import os
import sys
from collections import ChainMap, UserDict, UserList
from functools import cache
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


def has_own_state(kind: type) -> bool:
    """Whether the attributes of an object of this class are the user's state: not where a library defines the class."""
    module = kind.__module__ if isinstance(kind.__module__, str) else ""
    return not is_library(module) or kind in _BAGS or module.startswith(_STATEFUL)


def is_users_function(function: FunctionType) -> bool:
    """Whether the globals that a function names are the user's: written here, rather than installed."""
    name = function.__globals__.get("__name__") or ""
    return _is_users(str(name), function.__code__.co_filename)


def is_users_class(kind: type) -> bool:
    """Whether the attributes of the class itself may be the user's state."""
    name = kind.__module__ if isinstance(kind.__module__, str) else ""
    return _is_users(name, getattr(sys.modules.get(name), "__file__", None) or "")


def is_users_module(value: Any) -> bool:
    """Whether `value` is an imported module of the user's own."""
    if type(value) is not ModuleType:
        return False
    return _is_users(value.__name__, getattr(value, "__file__", None) or "")


@cache
def _is_users(module: str, filename: str) -> bool:
    """An installed package keeps its state to itself, or behind a bound on what a look may cost."""
    top = module.partition(".")[0]
    if top == "gaverify" or is_library(top):
        return False
    return not ("site-packages" in filename or "dist-packages" in filename or filename.startswith(_STANDARD))
