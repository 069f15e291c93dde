"""The coarsest arithmetic that a script trains in."""

from __future__ import annotations

import torch
from torch import nn

from gaverify.passes.precision import short_name, unit_roundoff


class Roundoff:
    """The largest unit roundoff of the parameters' dtypes and of autocast, and where the parameters live."""

    def __init__(self) -> None:
        self.unit = 0.0
        self.open = True
        self._dtypes: set[torch.dtype] = set()
        self._autocast: torch.dtype | None = None
        self._device = "cpu"
        self._known: set[int] = set()

    def add(self, module: nn.Module) -> None:
        """Looks at a module's parameters; from now on its first forward is watched for autocast."""
        if id(module) in self._known:
            self.open = False  # its first forward is over
            return
        self._known.add(id(module))
        self.open = True
        for parameter in module.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                self._dtypes.add(parameter.dtype)
                self._device = parameter.device.type
        self.unit = max([self.unit, *(unit_roundoff(dtype) for dtype in self._dtypes)])
        self.look_at_autocast()

    def look_inside(self, module: nn.Module) -> None:
        """Looks at a module that is called inside a forward: a wrapper may have cast its parameters for it."""
        self.look_at_autocast()
        for parameter in module.parameters(recurse=False):
            self.know(parameter.dtype)

    def know(self, dtype: torch.dtype) -> None:
        """Notes a type that gradients are computed or reduced in."""
        if dtype.is_floating_point:
            self.unit = max(self.unit, unit_roundoff(dtype))

    def look_at_autocast(self) -> None:
        """Notes the precision of autocast where it is on."""
        if self._autocast is None and torch.is_autocast_enabled(self._device):
            self._autocast = torch.get_autocast_dtype(self._device)
            self.unit = max(self.unit, unit_roundoff(self._autocast))

    def describe(self) -> dict[str, str | None]:
        """Returns device, parameters' dtype and autocast by name."""
        dtypes = ", ".join(sorted(short_name(dtype) for dtype in self._dtypes))
        autocast = short_name(self._autocast) if self._autocast is not None else None
        return {"device": self._device, "dtype": dtypes or "unknown", "autocast": autocast}
