"""What a script multiplies its loss by before it differentiates it: `loss / K` gives 1/K."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_DEEPEST = 8  # steps from what is differentiated down to the loss itself


class Weight:
    """Listens, while a backward pass runs, to the gradient of the innermost number that the loss was made from.

    From the root of the graph the chain of operations that have one operand with a gradient is followed for as long as
    the operands are single numbers. The gradient that flows into the last of them is what the script multiplied it by.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._seen: dict[int, float] = {}

    def begin(self, roots: Any) -> None:
        """A backward pass from `roots` begins; several roots have no one weight."""
        self._seen = {}
        node = roots.grad_fn if isinstance(roots, torch.Tensor) and roots.dim() == 0 else None
        for depth in range(_DEEPEST):
            if node is None:
                return
            self._hooks.append(node.register_prehook(self._note(depth)))
            following = [child for child, _ in node.next_functions if child is not None]
            node = following[0] if len(following) == 1 else None

    def end(self) -> float | None:
        """Returns the weight; None where none was seen."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self._seen[max(self._seen)] if self._seen else None

    def _note(self, depth: int) -> Callable[[tuple[torch.Tensor, ...]], None]:
        def note(gradients: tuple[torch.Tensor, ...]) -> None:
            if len(gradients) == 1 and gradients[0].dim() == 0:
                self._seen[depth] = float(gradients[0])

        return note
