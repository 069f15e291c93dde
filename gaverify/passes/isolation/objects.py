"""The attributes of plain objects and classes, in `__dict__` and in `__slots__`."""

from __future__ import annotations

from collections.abc import Callable
from types import MemberDescriptorType
from typing import Any

from gaverify.passes.isolation.containers import same_objects
from gaverify.passes.isolation.origins import is_library, module_of

Restore = Callable[[], None]
UNSET = object()


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the `__dict__` of an object, past any `__getattr__` that pretends to have one."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def keep_attributes(own: dict[str, Any]) -> tuple[Restore, list[Any]]:
    """Keeps which names an object's `__dict__` binds to what."""
    kept = dict(own)
    names, values = list(kept), list(kept.values())

    def restore() -> None:
        if len(own) == len(kept) and same_objects(own.values(), values) and list(own) == names:
            return
        for name in [name for name in own if name not in kept]:
            del own[name]
        own.update(kept)

    return restore, values


def slots_of(value: Any) -> list[tuple[MemberDescriptorType, Any]]:
    """Returns the `__slots__` of an object's classes, and what they hold; `UNSET` for one that was never assigned."""
    return [
        (slot, read(slot, value))
        for kind in type(value).__mro__
        if "__slots__" in vars(kind) and not is_library(module_of(kind))  # extension types have read-only members
        for slot in vars(kind).values()
        if type(slot) is MemberDescriptorType
    ]


def keep_slots(value: Any) -> tuple[Restore | None, list[Any]]:
    """Keeps what the `__slots__` of an object hold."""
    kept = slots_of(value)
    if not kept:
        return None, []

    def restore() -> None:
        for slot, entry in kept:
            if read(slot, value) is entry:
                continue
            if entry is UNSET:
                slot.__delete__(value)
            else:
                slot.__set__(value, entry)  # past the `__setattr__` of a frozen dataclass

    return restore, [entry for _, entry in kept if entry is not UNSET]


def read(slot: MemberDescriptorType, value: Any) -> Any:
    """Returns what a slot of an object holds, `UNSET` where it was never assigned."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return UNSET


def keep_class(kind: type) -> tuple[Restore, list[Any]]:
    """Keeps the attributes of a class (`Model.calls += 1`); those that Python itself keeps there stay out of it."""
    kept = {name: value for name, value in vars(kind).items() if not is_special(name)}
    before = list(vars(kind).values())

    def restore() -> None:
        now = vars(kind)
        if len(now) == len(before) and same_objects(now.values(), before):
            return
        for name in [name for name in now if name not in kept and not is_special(name)]:
            type.__delattr__(kind, name)
        for name, value in kept.items():
            if vars(kind).get(name, UNSET) is not value:
                type.__setattr__(kind, name, value)

    return restore, list(kept.values())


def is_special(name: str) -> bool:
    """Whether Python itself keeps a class's attribute of this name."""
    return (name.startswith("__") and name.endswith("__")) or name.startswith("_abc_")
