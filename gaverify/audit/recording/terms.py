"""The terms of a loss: what a script adds up before it differentiates, each alone in a control run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gaverify.audit.recording.graph import line_of
from gaverify.tracebacks import Place

MOST = 4
"""Terms that are told apart; those of a longer sum after the first three count as one."""
_SUMS = ("AddBackward0", "SubBackward0")
_DEEPEST = 64  # operations from the root down to the sum

_Edge = tuple[Any, int]  # a node of the graph, and which of its operands


class Terms:
    """The terms of one loss, in the order in which they are written.

    From the root down, what only scales a number (`loss / K`, the scale of a `GradScaler`) is passed by; the first sum
    or difference of numbers gives the terms. The gradient is linear in them: those of all terms add up to the whole.

    Args:
        roots: What is differentiated; several roots have no one sum.
    """

    def __init__(self, roots: Any) -> None:
        alone = isinstance(roots, torch.Tensor) and roots.numel() == 1
        self._made = _unscaled(roots.grad_fn if alone else None)
        edges = _addends(self._made if self._made is not None and self._made.name() in _SUMS else None)
        self._groups = [[edge] for edge in edges[: MOST - 1]] + [edges[MOST - 1 :]] * (len(edges) >= MOST)

    def __len__(self) -> int:
        return len(self._groups)

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Lets no gradient flow into the other terms; a loss without such a term gives none at all.

        Args:
            number: Of the term, from 1.
        """
        others = [edge for at, group in enumerate(self._groups, 1) if at != number for edge in group]
        hooks = [node.register_hook(_stopping(slot)) for node, slot in others]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def place(self, number: int) -> Place | None:
        """Returns the user's line that made a term, where the process keeps the lines of all operations."""
        if number > len(self._groups):
            return None
        node, slot = self._groups[number - 1][0]
        return line_of(node.next_functions[slot][0])

    @property
    def made(self) -> Place | None:
        """The user's line that made the loss: behind what only scales it."""
        return line_of(self._made)


def _unscaled(node: Any) -> Any:
    """Returns the operation that made a number, behind those that only scale it."""
    for _ in range(_DEEPEST):
        if node is None or not _is_number(node):
            return None
        operands = [child for child, _ in node.next_functions if child is not None]
        if len(operands) != 1 or not _is_number(operands[0]):
            return node
        node = operands[0]
    return None


def _addends(node: Any) -> list[_Edge]:
    """The operands of a sum, and of the sums among them in their place."""
    found: list[_Edge] = []
    waiting = [(node, slot) for slot in reversed(range(len(node.next_functions)))] if node is not None else []
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


def _stopping(slot: int) -> Callable[[Sequence[Any], Any], tuple[Any, ...]]:
    """Returns a hook of a node that makes nothing of the gradient for one operand."""

    def stopped(gradients: Sequence[Any], _: Any) -> tuple[Any, ...]:
        return tuple(
            torch.zeros_like(gradient) if at == slot and gradient is not None else gradient
            for at, gradient in enumerate(gradients)
        )

    return stopped
