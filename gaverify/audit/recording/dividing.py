"""What a script multiplies its loss by before it differentiates it: `loss / K` gives 1/K."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gaverify.thresholds import COMPUTED_FLOAT32

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
