"""A set of gradients on disk: a mapping that reads each one when it is asked for."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from gaverify.errors import ProblemError

_PORTION = 1 << 26  # bytes that are read together: small parameters are compared faster by the thousand


class _Place(NamedTuple):
    """Where a gradient lies in the file, and what it is."""

    offset: int
    size: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Spilled(Mapping[str, torch.Tensor | None]):
    """Gradients by parameter name, in a temporary file without a name: it goes with this object, or the process.

    A parameter without a gradient gives None. Sparse gradients stay in memory, being small on purpose.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="gaverify-")  # noqa: SIM115 - lives as long as the object
        self._places: dict[str, _Place | torch.Tensor | None] = {}
        self._end = 0

    def add(self, name: str, gradient: torch.Tensor | None) -> None:
        """Writes one gradient.

        Raises:
            ProblemError: The disk is full, or the file cannot be written.
        """
        if gradient is None or gradient.layout is not torch.strided:
            self._places[name] = gradient
            return
        host = gradient.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        size = host.numel() * host.element_size()
        try:
            self._file.seek(self._end)
            if size:
                self._file.write((ctypes.c_char * size).from_address(host.data_ptr()))
                self._file.flush()
        except OSError as error:
            raise ProblemError(
                f"spill: a gradient of {size} bytes cannot be written to {tempfile.gettempdir()}: {error.strerror}; "
                "name a folder with more room in the variable TMPDIR"
            ) from error
        self._places[name] = _Place(self._end, size, host.shape, host.dtype, gradient.device)
        self._end += size

    def __getitem__(self, name: str) -> torch.Tensor | None:
        """Reads one gradient, onto the device that it came from."""
        place = self._places[name]
        if not isinstance(place, _Place):
            return place
        host = torch.empty(place.shape, dtype=place.dtype, device="cpu")
        if place.size:
            self._file.seek(place.offset)
            self._file.readinto((ctypes.c_char * place.size).from_address(host.data_ptr()))  # type: ignore[attr-defined]
        return host.to(place.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def portions(self) -> Iterator[list[str]]:
        """Yields names whose gradients may be in memory together."""
        names: list[str] = []
        room = _PORTION
        for name, place in self._places.items():
            size = place.size if isinstance(place, _Place) else 0
            if names and size > room:
                yield names
                names, room = [], _PORTION
            names.append(name)
            room -= size
        if names:
            yield names


def spilled(parameters: Mapping[str, torch.nn.Parameter]) -> Spilled:
    """Moves the gradient of each parameter to disk, one after the other: each is freed before the next is copied."""
    found = Spilled()
    for name, parameter in parameters.items():
        found.add(name, parameter.grad)
        parameter.grad = None
    return found
