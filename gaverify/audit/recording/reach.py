"""Which forwards and parameters a backward pass reaches: a forward whose result is only looked at feeds no window."""

from __future__ import annotations

from typing import Any

import torch

from gaverify.audit.recording.graph import behind
from gaverify.passes.nesting import leaves

_MOST = 64  # results of one forward that are listened to


class Reach:
    """Listens at the results of forwards for gradients that flow into them."""

    def __init__(self) -> None:
        self._reached: set[int] = set()
        self._unknown: list[int] = []

    def listen(self, output: Any, forward: int) -> None:
        """Listens at the result of the forward with this number; one whose result hides its graph counts as reached."""
        results = [leaf for _, leaf in leaves(output, "") if isinstance(leaf, torch.Tensor)]
        nodes = [result.grad_fn for result in results if result.grad_fn is not None]
        for node in nodes[:_MOST]:
            node.register_prehook(lambda *_: self._reached.add(forward))
        if not nodes and (not results or any(result.requires_grad for result in results)):
            self._unknown.append(forward)

    def begin(self) -> None:
        """A backward pass begins."""
        self._reached.clear()

    def peek(self) -> list[int]:
        """Returns the forwards that a differentiation has reached that may turn out to be no backward pass."""
        return sorted({*self._reached, *self._unknown})

    def end(self) -> list[int]:
        """Returns the forwards that the backward pass has reached."""
        found = self.peek()
        self._reached.clear()
        self._unknown.clear()
        return found


def ends_in_parameters(roots: Any) -> bool:
    """Whether the graph behind what is differentiated has a parameter at one of its ends.

    One that ends in inputs, or in weights that `functional_call` was given, trains nothing. A function written in
    Python may differentiate parameters that its node does not name, as checkpointing does: it counts as one that does.

    Args:
        roots: A tensor, or several in any nesting.
    """
    tensors = [leaf for _, leaf in leaves(roots, "") if isinstance(leaf, torch.Tensor)]
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors):
        return True
    return any(
        isinstance(node, torch.autograd.function.BackwardCFunction)
        or isinstance(getattr(node, "variable", None), torch.nn.Parameter)
        for node in behind(tensor.grad_fn for tensor in tensors)
    )
