"""What a script differentiates: what it multiplies its loss by (`loss / K` gives 1/K), and the terms that it adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gaverify.audit.recording.graph import line_of
from gaverify.passes.walks import addends, unscaled
from gaverify.thresholds import COMPUTED_FLOAT32
from gaverify.tracebacks import Place

MOST = 4
"""Terms that are told apart; those of a longer sum after the first three count as one."""
_DEEPEST = 8  # steps from what is differentiated down to the loss itself


class Weight:
    """Listens, while a backward pass runs, to the gradient of the innermost number that the loss was made from.

    From the root of the graph the chain of operations that have one operand with a gradient is followed for as long as
    the operands are single numbers. The gradient that flows into the last of them is what the script multiplied it by.
    What flows into the rows behind it, 1/n of that for a mean over n of them, tells how many the script has counted; of
    a sum of several terms the first tells it.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._seen: dict[int, float] = {}
        self._share = 0.0

    def begin(self, roots: Any) -> None:
        """A backward pass from `roots` begins; several roots have no one weight."""
        self._seen, self._share = {}, 0.0
        node = roots.grad_fn if isinstance(roots, torch.Tensor) and roots.numel() == 1 else None
        alone = True
        for depth in range(_DEEPEST):
            if node is None:
                return
            self._hooks.append(node.register_prehook(self._note(depth, alone)))
            following = [child for child, _ in node.next_functions if child is not None]
            alone = alone and len(following) == 1
            node = following[0] if following else None

    def end(self) -> float | None:
        """Returns the weight; None where none was seen."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self._seen[max(self._seen)] if self._seen else None

    @property
    def counted(self) -> float | None:
        """What the loss was divided by, up to a factor that all micro-batches share; None where that was not seen."""
        return 1 / self._share if self._share and math.isfinite(1 / self._share) else None

    @property
    def of_a_sum(self) -> bool:
        """Whether the loss is a sum of its rows that the script divided itself: each flows in with the weight whole."""
        weight = abs(self._seen[max(self._seen)]) if self._seen else 0.0
        return weight > 0.0 and math.isclose(weight, self._share, rel_tol=COMPUTED_FLOAT32)

    def _note(self, depth: int, alone: bool) -> Callable[[tuple[torch.Tensor, ...]], None]:
        def note(gradients: tuple[torch.Tensor, ...]) -> None:
            if len(gradients) != 1:
                return
            if gradients[0].numel() == 1:
                self._seen |= {depth: float(gradients[0])} if alone else {}
            elif not self._share:
                self._share = float(gradients[0].abs().max()) if gradients[0].numel() else math.inf

        return note


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
