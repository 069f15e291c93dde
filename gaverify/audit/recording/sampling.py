"""A few elements of every parameter, always the same ones: enough to fit weights and to see that something changed.

Shapes: S sampled elements of all parameters of one optimizer, laid end to end. A linear relation between gradients
holds for every element, hence for any choice of them; and the same elements are read in every run.
"""

from __future__ import annotations

import torch

from gaverify.audit.recording.values import plain

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
        known = [plain(parameter) for parameter in parameters]
        self.complete = all(values is not None for values in known)
        self._counts = [0 if values is None else values.numel() for values in known]
        total = sum(self._counts)
        self._positions = [
            positions(at, count, total).to("cpu" if values is None else values.device)
            for at, (values, count) in enumerate(zip(known, self._counts, strict=True))
        ]
        self.sizes = [len(position) for position in self._positions]

    def gradients(self) -> torch.Tensor:
        """Returns the elements of the gradients, as `read` does."""
        return self.read([parameter.grad for parameter in self.parameters])

    def weights(self) -> torch.Tensor:
        """Returns the elements of the parameters as float64 on the CPU."""
        return self.read(list(self.parameters))

    def elements(self, at: int, values: torch.Tensor) -> torch.Tensor:
        """Returns the chosen elements of a gradient of the parameter at a position, as float64 on the CPU."""
        dense = values.to_dense() if values.layout is not torch.strided else values
        chosen = dense.reshape(-1)[self._positions[at]]
        return (chosen.abs() if chosen.is_complex() else chosen).to("cpu", torch.float64)

    def stretches(self) -> torch.Tensor:
        """Returns for each sampled element how many elements of its parameter it stands for."""
        pairs = zip(self._counts, self.sizes, strict=True)
        parts = [torch.full((size,), count / max(size, 1), dtype=torch.float64, device="cpu") for count, size in pairs]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def read(self, tensors: list[torch.Tensor | None]) -> torch.Tensor:
        """Returns the elements of tensors of the parameters' shapes as float64 on the CPU; zero where there is none."""
        parts = []
        for tensor, position in zip(tensors, self._positions, strict=True):
            values = plain(tensor) if tensor is not None and len(position) else None
            if values is None:
                parts.append(torch.zeros(len(position), dtype=torch.float64, device="cpu"))
                continue
            dense = values.to_dense() if values.layout is not torch.strided else values
            chosen = dense.reshape(-1)[position]
            parts.append(chosen.abs() if chosen.is_complex() else chosen)
        if not parts:
            return torch.zeros(0, dtype=torch.float64, device="cpu")
        # One transfer where all parameters live on one device.
        if len({(part.device, part.dtype) for part in parts}) == 1:
            return torch.cat(parts).to(torch.float64).cpu()
        return torch.cat([part.to("cpu", torch.float64) for part in parts])


def positions(ordinal: int, numel: int, total: int) -> torch.Tensor:
    """Returns the sorted positions to read of the parameter number `ordinal`, the same in every run."""
    if not numel:
        return torch.arange(0, device="cpu")
    wanted = min(numel, max(FEWEST, TOTAL * numel // max(total, 1)))
    if wanted == numel:
        return torch.arange(numel, device="cpu")
    generator = torch.Generator().manual_seed(ordinal)
    starts = (
        torch.randint(max(numel // _RUN, 1), (-(-wanted // _RUN),), generator=generator, device="cpu").sort().values
        * _RUN
    )
    return (starts[:, None] + torch.arange(_RUN, device="cpu")).flatten().clamp_max(numel - 1)
