"""The terms of a loss: what a script adds up before it differentiates, each alone in a control run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gaverify.audit.recording.graph import line_of
from gaverify.passes.addends import addends, unscaled
from gaverify.tracebacks import Place

MOST = 4
"""Terms that are told apart; those of a longer sum after the first three count as one."""


class Terms:
    """The terms of one loss, in the order in which they are written.

    From the root down, what only scales a number (`loss / K`, the scale of a `GradScaler`) is passed by; the first sum
    or difference of numbers gives the terms. The gradient is linear in them: those of all terms add up to the whole.

    Args:
        roots: What is differentiated; several roots have no one sum.
    """

    def __init__(self, roots: Any) -> None:
        alone = isinstance(roots, torch.Tensor) and roots.numel() == 1
        self._made = unscaled(roots.grad_fn if alone else None)
        edges = addends(self._made)
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


def _stopping(slot: int) -> Callable[[Sequence[Any], Any], tuple[Any, ...]]:
    """Returns a hook of a node that makes nothing of the gradient for one operand."""

    def stopped(gradients: Sequence[Any], _: Any) -> tuple[Any, ...]:
        return tuple(
            torch.zeros_like(gradient) if at == slot and gradient is not None else gradient
            for at, gradient in enumerate(gradients)
        )

    return stopped
