"""The nested containers that a batch may be: their entries, and the same containers around other entries."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def leaves(node: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yields every leaf of a nested batch with its path, in order."""
    entries = children(node)
    if entries is None:
        yield path, node
        return
    for key, child in entries:
        yield from leaves(child, f"{path}{key}")


def rebuilt(node: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the same nested containers around `change(leaf)` of every leaf."""
    entries = children(node)
    if entries is None:
        return change(node)
    return with_children(node, [rebuilt(child, change) for _, child in entries])


def map_leaves(node: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Returns the same nested containers around `change(path, leaf)`; those in which nothing changes, as they are."""
    entries = children(node)
    if entries is None:
        return change(path, node)
    mapped = [map_leaves(child, change, f"{path}{key}") for key, child in entries]
    is_unchanged = all(new is old for new, (_, old) in zip(mapped, entries, strict=True))
    return node if is_unchanged else with_children(node, mapped)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is a tensor or an array with a shape that can be sliced."""
    return isinstance(leaf, torch.Tensor) or (hasattr(leaf, "__array__") and hasattr(leaf, "shape"))


def is_namedtuple(node: Any) -> bool:
    """Whether `node` is a tuple whose entries have names, each a field of one record."""
    return isinstance(node, tuple) and hasattr(node, "_fields")


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Returns the named entries of a container, or None for a leaf."""
    if is_array(node) or isinstance(node, str | bytes | type):
        return None
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if is_namedtuple(node):
        return [(f".{name}", getattr(node, name)) for name in node._fields]
    if isinstance(node, list | tuple):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    if dataclasses.is_dataclass(node):
        return [(f".{entry.name}", getattr(node, entry.name)) for entry in dataclasses.fields(node)]
    # A plain object with tensors, such as a graph's batch; one without any is a leaf: a configuration, a tokenizer.
    if hasattr(node, "__dict__") and any(isinstance(value, torch.Tensor) for value in vars(node).values()):
        return [(f".{name}", value) for name, value in vars(node).items()]
    return None


def with_children(node: Any, values: list[Any]) -> Any:
    """Returns a container of the same type as `node` around other entries."""
    if isinstance(node, Mapping):
        # A mapping that cannot be written to is rebuilt as a dict: its keys are what a loss reads.
        if not hasattr(node, "__setitem__"):
            return dict(zip(node, values, strict=True))
        result = copy.copy(node)
        for key, value in zip(list(node), values, strict=True):
            result[key] = value
        return result
    if is_namedtuple(node):
        return type(node)(*values)
    if isinstance(node, list | tuple):
        return type(node)(values)
    result = copy.copy(node)
    names = [e.name for e in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else list(vars(node))
    for name, value in zip(names, values, strict=True):
        object.__setattr__(result, name, value)  # reaches frozen dataclasses too; `result` is ours
    return result
