"""The runs that change something on purpose: weights moved by their roundoff, steps undone, losses multiplied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gaverify.passes.perturbation import Coins, move, rounding_share


class Perturbation:
    """Moves each weight once by its own roundoff, for the noise floor (`passes.perturbation`).

    Args:
        unit: Unit roundoff of the coarsest arithmetic in the script; a parameter's own may be coarser still.
        coins: Seeds the directions.
    """

    def __init__(self, unit: float, coins: int = 0) -> None:
        self._unit = unit
        self._moved: dict[int, torch.Tensor] = {}  # keeps the parameters, so that no id is used again
        self._coins = Coins(coins)

    def move(self, parameters: Iterable[torch.Tensor]) -> None:
        """Moves those that have not been moved yet."""
        for parameter in parameters:
            if id(parameter) in self._moved or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._moved[id(parameter)] = parameter
            move(parameter, rounding_share(parameter, self._unit), self._coins)


@contextmanager
def shrunk(losses: torch.Tensor | Sequence[torch.Tensor], factor: float) -> Iterator[None]:
    """Multiplies what a backward pass starts from, and so every gradient; a power of two rounds nothing."""
    roots = [losses] if isinstance(losses, torch.Tensor) else list(losses)
    hooks = [root.register_hook(lambda gradient: gradient * factor) for root in roots if root.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Held:
    """Undoes an optimizer's step: the weights as they were before it."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keeps the weights."""
        self._kept = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @torch.no_grad()
    def put_back(self) -> None:
        """Puts the weights back."""
        for parameter, value in self._kept:
            parameter.data.copy_(value)
        self._kept = []


def use_math_kernels() -> None:
    """Runs attention unfused in this process: draws inside a fused kernel cannot be replayed."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    if hasattr(torch.backends.cuda, "enable_cudnn_sdp"):
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)
