"""What a module has registered: submodules, empty registries, and everything that a scripted one keeps in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Restore = Callable[[], None]
# What every `nn.Module` carries for its own bookkeeping; the user's state lies beside these.
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


def keep_submodules(module: nn.Module) -> Restore:
    """Takes away submodules that a forward added and gives back those that it removed, in their order.

    One that was exchanged stays until `mode_set` closes, which says why.
    """
    registry = module._modules
    kept = dict(registry)

    def restore() -> None:
        if list(registry) != list(kept):
            wanted = {name: registry.get(name, child) for name, child in kept.items()}
            registry.clear()
            registry.update(wanted)

    return restore


def empty_registries(module: nn.Module) -> list[Any]:
    """The registries that hold nothing yet, most of a dozen per module; the others are kept as any container is."""
    own = vars(module)
    return [own[name] for name in OWN_ATTRIBUTES - {"_modules"} if type(own.get(name)) in _EMPTY and not own[name]]


_EMPTY = tuple({type(value) for value in vars(nn.Module()).values() if hasattr(value, "clear")})


def keep_empty(registries: list[Any]) -> Restore:
    """Empties what a forward has registered there: a hook, a parameter, a buffer."""

    def restore() -> None:
        for registry in registries:
            if registry:
                registry.clear()

    return restore


def scripted_attributes(module: torch.jit.ScriptModule) -> dict[str, Any]:
    """Returns what a scripted or traced module keeps in C++; lists and dictionaries come as copies."""
    concrete = getattr(module, "_concrete_type", None)
    return {name: module._c.getattr(name) for name in concrete.get_attributes()} if concrete is not None else {}


def keep_scripted(module: torch.jit.ScriptModule) -> tuple[Restore, list[Any]]:
    """Keeps the attributes of a scripted or traced module: numbers, lists, buffers, its mode."""
    kept, held = scripted_attributes(module), module._c

    def restore() -> None:
        for name, value in kept.items():
            now = held.getattr(name)
            if now is not value and (isinstance(value, torch.Tensor) or now != value):
                held.setattr(name, value)

    return restore, [value for value in kept.values() if isinstance(value, torch.Tensor)]
