"""A few elements of every parameter, always the same ones: enough to fit weights and to see that something changed.

Shapes: S sampled elements of all parameters of one optimizer, laid end to end. A linear relation between gradients
holds for every element, hence for any choice of them; and the same elements are read in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        return self.read(self.parameters)

    def elements(self, at: int, values: torch.Tensor) -> torch.Tensor:
        """Returns the chosen elements of a gradient of the parameter at a position, as float64 on the CPU."""
        return read([(values, self._positions[at])])[0]

    def stretches(self) -> torch.Tensor:
        """Returns for each sampled element how many elements of its parameter it stands for."""
        pairs = zip(self._counts, self.sizes, strict=True)
        parts = [torch.full((size,), count / max(size, 1), dtype=torch.float64, device="cpu") for count, size in pairs]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")

    def read(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Returns the elements of tensors of the parameters' shapes as float64 on the CPU; zero where there is none."""
        parts = read(list(zip(tensors, self._positions, strict=True)))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")


@torch.no_grad()
def read(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the chosen elements of every tensor as float64 on the CPU; of one device and type in one transfer."""
    parts = []
    for tensor, chosen in pairs:
        values = plain(tensor) if tensor is not None and len(chosen) else None
        if values is None:
            parts.append(torch.zeros(len(chosen), dtype=torch.float64, device="cpu"))
            continue
        dense = values.to_dense() if values.layout is not torch.strided else values
        elements = dense.reshape(-1)[chosen.to(values.device)]
        parts.append(elements.abs() if elements.is_complex() else elements)
    if len({(part.device, part.dtype) for part in parts}) == 1:
        return list(torch.cat(parts).to(torch.float64).cpu().split([len(part) for part in parts]))
    return [part.to("cpu", torch.float64) for part in parts]


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
