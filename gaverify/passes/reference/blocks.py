"""The blocks of a model whose activations are worth making again: those of its modules that are repeated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

_CHAIN = 4  # members from which on a plain chain of layers is cut into parts


def blocks_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the modules that are checkpointed one by one: none lies inside another, each is named once.

    A block has modules of its own and a sibling of its class. A chain (`nn.Sequential`) is looked into first, because
    its members keep what it keeps and are smaller; one without repeated members is a block itself, and where it is a
    long one `parts_of` cuts it. A single layer is none: of a layer hardly more is saved than the input, which
    checkpointing saves as well.
    """
    found: dict[int, nn.Module] = {}
    for root in modules:
        found |= {id(block): block for block in _inside(root)}
    return list(found.values())


def _inside(module: nn.Module) -> list[nn.Module]:
    """The blocks inside a module; the module itself where it is a long chain without any."""
    if isinstance(module, torch.jit.ScriptModule):  # its forward cannot be exchanged
        return []
    children = list(_called(module.children()))
    alike = Counter(type(child) for child in children)
    found: list[nn.Module] = []
    for child in children:
        if not any(True for _ in child.children()):
            continue
        repeated = alike[type(child)] > 1
        inner = _inside(child) if is_chain(child) or not repeated else []
        found += inner or ([child] if repeated else [])
    return found or ([module] if is_chain(module) and len(children) >= _CHAIN else [])


def _called(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Modules that a forward calls: a list of modules is never called, its entries are."""
    for module in modules:
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):
            yield from _called(module.children())
        elif not isinstance(module, torch.jit.ScriptModule):
            yield module


def is_chain(module: nn.Module) -> bool:
    """Whether a module does nothing but run its members one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def parts_of(chain: nn.Module) -> list[nn.Sequential]:
    """Cuts a long chain of n members into √n parts: as many inputs are kept as members are run again at a time."""
    members = list(chain.children())
    if len(members) < _CHAIN:
        return [nn.Sequential(*members)]
    size = math.isqrt(max(len(members) - 1, 0)) + 1
    return [nn.Sequential(*members[at : at + size]) for at in range(0, len(members), size)]
