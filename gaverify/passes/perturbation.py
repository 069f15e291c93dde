"""Weights moved by a share of themselves: by their roundoff for a noise floor, by more for a second point to look from.

w ← w · (1 ± share)        each element by a coin of its own
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gaverify.passes.precision import unit_roundoff


def rounding_share(parameter: torch.Tensor, unit: float) -> float:
    """Returns 2 u: as a share of a weight, one to two units in its last place.

    A move by u alone would be half a unit in the last place of some weights, and round back to where they were.

    Args:
        parameter: The weight, whose own dtype may be coarser than the rest.
        unit: Unit roundoff u of the coarsest arithmetic that takes part.
    """
    return 2.0 * max(unit, unit_roundoff(parameter.dtype))


class Coins:
    """Coins from one seed, thrown where the weights lie: nothing waits for a copy of them.

    Args:
        seed: Every device starts from it.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def thrown(self, like: torch.Tensor) -> torch.Tensor:
        """Returns -1 or 1 for every element of a real tensor."""
        device = like.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        sides = torch.randint(0, 2, like.shape, generator=self._generators[device], device=device)
        return sides.to(like.dtype) * 2 - 1


@torch.no_grad()
def move(parameter: torch.Tensor, share: float, coins: Coins) -> None:
    """Moves each element of a parameter up or down by a share of itself, in place; complex ones part by part."""
    data: Any = parameter.data
    if hasattr(data, "to_local"):  # a sharded parameter: each process moves its own part
        data = data.to_local()
    real = torch.view_as_real(data) if data.is_complex() else data
    real.add_(real * coins.thrown(real), alpha=share)


@contextmanager
def moved(parameters: Sequence[torch.Tensor], shares: Sequence[float], seed: int = 0) -> Iterator[None]:
    """Holds parameters moved by a share of themselves each, and puts them back bit for bit.

    Args:
        parameters: What to move.
        shares: By how much each; `rounding_share` for a noise floor.
        seed: Of the coins.
    """
    kept = [parameter.detach().clone() for parameter in parameters]
    coins = Coins(seed)
    try:
        for parameter, share in zip(parameters, shares, strict=True):
            move(parameter, share, coins)
        yield
    finally:
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.data.copy_(value)
