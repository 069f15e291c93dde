"""A walk through whatever hangs together: the steps of a trace, the nodes of a graph, classes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reached(starts: Iterable[T], onwards: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields everything that a walk from some starts comes to, these among it, each once.

    Args:
        starts: Where it begins.
        onwards: What follows one; nothing where the walk ends.
    """
    queue, seen = list(starts), set[T]()
    while queue:
        current = queue.pop()
        if current not in seen:
            seen.add(current)
            yield current
            queue.extend(onwards(current))
