"""What containers hold: lists, dictionaries, sets, queues, bytes and arrays, with their subclasses.

Entries are compared by identity, which never runs the user's `__eq__`, and nothing is written where nothing changed: an
iterator that the user holds over a dictionary goes on.
"""

from __future__ import annotations

import array
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from operator import is_
from typing import Any

Restore = Callable[[], None]
CONTAINERS = (dict, list, set, deque)
BYTES = (bytearray, array.array)
# A data set or a vocabulary is not what a forward changes. Containers with more entries are not copied at all; a copy
# of a million references takes 5 ms, and as long again to compare after each pass.
_COPIED = 2_000_000
_COPIED_BYTES = 1 << 24  # the same bound for arrays, whose values have to be copied


def entries_of(value: Any, most: int, *, values: bool = False) -> list[Any]:
    """Returns the first entries of a container (a mapping's keys, or its `values`), whatever its class does."""
    base = _base(value)
    return list(islice(base.values(value) if values and isinstance(value, dict) else base.__iter__(value), most))


def _base(value: Any) -> Any:
    """The built-in class below a user's own, which may make something else of the same methods."""
    return next(kind for kind in (OrderedDict, dict, list, set, deque, tuple, frozenset) if isinstance(value, kind))


def same_objects(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two iterables of one length give the same objects in the same order."""
    return all(map(is_, one, other))


def keep_container(value: Any) -> tuple[Restore | None, list[Any]]:
    """Keeps the entries of a container; returns what puts them back, and the entries."""
    if len(value) > _COPIED:
        return None, []
    if isinstance(value, dict):
        return _keep_mapping(value, _base(value))
    if isinstance(value, set):
        return _keep_set(value)
    return _keep_sequence(value, _base(value))


def _keep_mapping(value: dict[Any, Any], base: Any) -> tuple[Restore, list[Any]]:
    keys, entries = list(base.__iter__(value)), list(base.values(value))

    def restore() -> None:
        if len(value) == len(keys) and same_objects(base.__iter__(value), keys):
            if same_objects(base.values(value), entries):
                return
        else:
            base.clear(value)  # or the order would not come back
        for key, entry in zip(keys, entries, strict=True):
            base.__setitem__(value, key, entry)

    return restore, entries


def _keep_set(value: set[Any]) -> tuple[Restore, list[Any]]:
    kept = set(set.__iter__(value))

    def restore() -> None:
        if not set.__eq__(value, kept):
            set.clear(value)
            set.update(value, kept)

    return restore, list(kept)


def _keep_sequence(value: Any, base: Any) -> tuple[Restore, list[Any]]:
    kept = list(base.__iter__(value))

    def restore() -> None:
        if len(value) != len(kept) or not same_objects(base.__iter__(value), kept):
            base.clear(value)
            base.extend(value, kept)

    return restore, kept


def keep_bytes(value: Any) -> Restore | None:
    """Keeps the contents of a `bytearray` or an `array.array`."""
    if len(value) > _COPIED_BYTES:
        return None
    kept = value[:]

    def restore() -> None:
        if value != kept:
            value[:] = kept

    return restore


def keep_ndarray(value: Any) -> tuple[Restore | None, list[Any]]:
    """Keeps the contents of a NumPy array that can be written to; the entries of an array of objects as well."""
    if not value.flags.writeable or value.nbytes > _COPIED_BYTES:
        return None, []
    kept, objects = value.copy(), value.dtype.hasobject

    def restore() -> None:
        if value.shape != kept.shape:
            value.resize(kept.shape, refcheck=False)
        value[...] = kept

    return restore, kept.ravel().tolist() if objects and value.dtype.names is None else []


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
