"""Walks through whatever hangs together (steps of a trace, nodes of a graph, classes), and the addends of a loss."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=Hashable)


def walk_from(starts: Iterable[T], onwards: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields everything that a walk from some starts comes to, these among it, each once.

    Args:
        starts: Where it begins.
        onwards: What follows one; nothing where the walk ends.
    """
    queue, visited = list(starts), set[T]()
    while queue:
        current = queue.pop()
        if current not in visited:
            visited.add(current)
            yield current
            queue.extend(onwards(current))


_SUMS = ("AddBackward0", "SubBackward0")
_DEEPEST = 64  # operations from the root down to the sum

Edge = tuple[Any, int]  # a node of the graph, and which of its operands


def skip_scaling(node: Any) -> Any:
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
    operands: list[Edge] = []
    summed = node is not None and node.name() in _SUMS
    waiting = [(node, slot) for slot in reversed(range(len(node.next_functions)))] if summed else []
    while waiting:
        holder, slot = waiting.pop()
        child = holder.next_functions[slot][0]
        # An operand without a graph: a constant.
        if child is None:
            continue
        if child.name() in _SUMS:
            # Reversed, so that operands come out in the order in which the user wrote them.
            waiting += [(child, inner) for inner in reversed(range(len(child.next_functions)))]
        else:
            operands.append((holder, slot))
    return operands


def has_constant_addend(node: Any) -> bool:
    """Whether an operation is a sum with an operand that has no gradient, or holds such a sum among its operands."""

    def operands(each: Any) -> list[Any]:
        return [child for child, _ in each.next_functions] if each is not None and each.name() in _SUMS else []

    return None in walk_from([node], operands)


_VIEWS = (
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "ExpandBackward0",
    "UnsqueezeBackward0",
    "ToCopyBackward0",
)


def skip_views(node: Any) -> Any:
    """Returns the operation whose result has only been given another shape, order or precision since."""
    while node.name() in _VIEWS and _operands(node):
        node = _operands(node)[0]
    return node


def read_by_parameters(starts: Iterable[Any]) -> set[Any]:
    """Returns every node whose result, or what was made of it, was combined with a parameter of several elements.

    Args:
        starts: The nodes of a loss.
    """
    read: list[Any] = []
    for node in walk_from((start for start in starts if start is not None), _operands):
        operands = _operands(node)
        # Two operands at least: a parameter that is only reshaped or cast combines nothing.
        if len(operands) > 1 and any(map(_is_parameter, operands)):
            read += operands
    return set(walk_from(read, _operands))


def is_made_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter of several elements, in another shape or precision maybe."""
    if tensor.grad_fn is None:
        return tensor.requires_grad and tensor.numel() > 1
    return _is_parameter(tensor.grad_fn)


def _operands(node: Any) -> list[Any]:
    return [operand for operand, _ in node.next_functions if operand is not None]


def _is_parameter(node: Any) -> bool:
    """Whether a node is a parameter, in another shape or precision maybe; a learned scale of a loss is a number."""
    node = skip_views(node)
    return hasattr(node, "variable") and node.variable.numel() > 1


def _is_number(node: Any) -> bool:
    shapes = [tuple(each.shape) for each in getattr(node, "_input_metadata", ())]
    return len(shapes) == 1 and all(size == 1 for size in shapes[0])  # a loss of shape (1,) is one as well
