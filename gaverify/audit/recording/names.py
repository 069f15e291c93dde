"""Names of parameters: those of the outermost modules whose forward ran, whatever wraps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_WRAPPERS = ("module", "_orig_mod")


def plain_name(name: str) -> str:
    """Returns a parameter's name without the prefixes of `DataParallel`, DDP and `torch.compile`."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class Names:
    """Knows the outermost modules with something to train, and what their parameters are called."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self._known: dict[int, bool] = {}
        self._names: dict[int, tuple[int, str]] = {}
        self._used: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps ids from being used again

    def add(self, module: nn.Module) -> bool:
        """Notes an outermost module; returns whether it has parameters to train."""
        known = self._known.get(id(module))
        if known is not None:
            return known
        trains = any(parameter.requires_grad for parameter in module.parameters())
        self._known[id(module)] = trains
        self._kept.append(module)
        if trains:
            self.models.append(module)
            for name, parameter in module.named_parameters():
                self._names.setdefault(id(parameter), (len(self.models) - 1, plain_name(name)))
        return trains

    def key(self, parameter: torch.Tensor, optimizer: int, ordinal: int) -> str:
        """Returns `model:name`; a parameter of no module is called by its place in its optimizer."""
        if id(parameter) not in self._names:
            return f"-:optimizer{optimizer}.{ordinal}"
        model, name = self._names[id(parameter)]
        return f"{self._used.setdefault(model, len(self._used))}:{name}"

    def index(self, module: nn.Module) -> int:
        """Returns the position of a noted module."""
        return next(at for at, model in enumerate(self.models) if model is module)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns all buffers of the noted modules by `model:name`."""
        found = {}
        for at, model in enumerate(self.models):
            found.update({f"{at}:{plain_name(name)}": buffer for name, buffer in model.named_buffers()})
        return found
