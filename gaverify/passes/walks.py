"""Walks through whatever hangs together (steps of a trace, nodes of a graph, classes), and the addends of a loss."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

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


_SUMS = ("AddBackward0", "SubBackward0")
_DEEPEST = 64  # operations from the root down to the sum

Edge = tuple[Any, int]  # a node of the graph, and which of its operands


def unscaled(node: Any) -> Any:
    """Returns the operation that made a number, behind those that only scale it."""
    for _ in range(_DEEPEST):
        if node is None or not _is_number(node):
            return None
        operands = [child for child, _ in node.next_functions if child is not None]
        if len(operands) != 1 or not _is_number(operands[0]):
            return node
        node = operands[0]
    return None


def addends(node: Any) -> list[Edge]:
    """Returns the operands of a sum, and of the sums among them in their place; none of another operation."""
    found: list[Edge] = []
    summed = node is not None and node.name() in _SUMS
    waiting = [(node, slot) for slot in reversed(range(len(node.next_functions)))] if summed else []
    while waiting:
        holder, slot = waiting.pop()
        child = holder.next_functions[slot][0]
        if child is None:
            continue
        if child.name() in _SUMS:
            waiting += [(child, inner) for inner in reversed(range(len(child.next_functions)))]
        else:
            found.append((holder, slot))
    return found


def _is_number(node: Any) -> bool:
    shapes = [tuple(each.shape) for each in getattr(node, "_input_metadata", ())]
    return len(shapes) == 1 and all(size == 1 for size in shapes[0])  # a loss of shape (1,) is one as well
