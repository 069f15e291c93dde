"""A few elements of every parameter, always the same ones: enough to fit weights and to see that something changed.

Shapes: S sampled elements of all parameters of one optimizer, laid end to end. A linear relation between gradients
holds for every element, hence for any choice of them; and the same elements are read in every run.
"""

from __future__ import annotations

import torch

TOTAL = 8192
"""Elements of all parameters together, where each has its share; few enough that torch reads them in one thread."""

FEWEST = 16
"""Elements of each parameter at least."""

_RUN = 16  # neighbours that are read together: one line of the cache in float32


class Sample:
    """The chosen elements of one optimizer's parameters.

    Args:
        parameters: In the order of the optimizer's groups.
    """

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        total = sum(parameter.numel() for parameter in parameters)
        self._positions = [positions(at, p.numel(), total).to(p.device) for at, p in enumerate(parameters)]
        self.sizes = [len(position) for position in self._positions]

    def gradients(self) -> torch.Tensor:
        """Returns the elements of the gradients as float64 on the CPU; zero where there is no gradient."""
        return self._read([parameter.grad for parameter in self.parameters])

    def weights(self) -> torch.Tensor:
        """Returns the elements of the parameters as float64 on the CPU."""
        return self._read(list(self.parameters))

    def stretches(self) -> torch.Tensor:
        """Returns for each sampled element how many elements of its parameter it stands for."""
        pairs = zip(self.parameters, self.sizes, strict=True)
        parts = [torch.full((size,), p.numel() / max(size, 1), dtype=torch.float64) for p, size in pairs]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def _read(self, tensors: list[torch.Tensor | None]) -> torch.Tensor:
        parts = []
        for tensor, position in zip(tensors, self._positions, strict=True):
            if tensor is None:
                parts.append(torch.zeros(len(position), dtype=torch.float64))
                continue
            tensor = tensor.detach()
            dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
            values = dense.reshape(-1)[position]
            parts.append(values.abs() if values.is_complex() else values)
        if not parts:
            return torch.zeros(0, dtype=torch.float64)
        # One transfer where all parameters live on one device.
        if len({(part.device, part.dtype) for part in parts}) == 1:
            return torch.cat(parts).to(torch.float64).cpu()
        return torch.cat([part.to("cpu", torch.float64) for part in parts])


def positions(ordinal: int, numel: int, total: int) -> torch.Tensor:
    """Returns the sorted positions to read of the parameter number `ordinal`, the same in every run."""
    wanted = min(numel, max(FEWEST, TOTAL * numel // max(total, 1)))
    if wanted == numel:
        return torch.arange(numel)
    generator = torch.Generator().manual_seed(ordinal)
    starts = torch.randint(max(numel // _RUN, 1), (-(-wanted // _RUN),), generator=generator).sort().values * _RUN
    return (starts[:, None] + torch.arange(_RUN)).flatten().clamp_max(numel - 1)
