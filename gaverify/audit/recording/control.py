"""The two runs that change something on purpose: weights moved by one unit roundoff, and steps undone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gaverify.precision import unit_roundoff


class Perturbation:
    """Moves each weight once, up or down by one unit in the last place, by a coin of its own.

    Args:
        unit: Unit roundoff of the coarsest arithmetic in the script; a parameter's own may be coarser still.
    """

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._moved: dict[int, torch.Tensor] = {}  # keeps the parameters, so that no id is used again
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def move(self, parameters: Iterable[torch.Tensor]) -> None:
        """Moves those that have not been moved yet."""
        for parameter in parameters:
            if id(parameter) in self._moved or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._moved[id(parameter)] = parameter
            data = parameter.data
            real = torch.view_as_real(data) if data.is_complex() else data
            coin = torch.randint(0, 2, real.shape, generator=self._generator).to(real.device, real.dtype)
            real.add_(real * (coin * 2 - 1), alpha=2 * max(self._unit, unit_roundoff(parameter.dtype)))


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
