"""The coarsest arithmetic that a script trains in."""

from __future__ import annotations

import torch
from torch import nn

from gaverify.passes.precision import Arithmetic, coarsest_unit, rounded_products, rounded_unit, short_name


class Roundoff:
    """What carries gradients: trained parameters, autocast around them, products of backward passes, reductions.

    `arithmetic` is filled where the passes run; `device` is where the parameters live.
    """

    def __init__(self) -> None:
        self.open = True
        self.arithmetic = Arithmetic()
        self._dtypes: set[torch.dtype] = set()
        self._autocast: torch.dtype | None = None
        self._device = "cpu"
        self._known: set[int] = set()

    @property
    def unit(self) -> float:
        """The largest unit roundoff of all of it, and what torch rounds its products to; 0 for nothing seen."""
        dtypes = {*self._dtypes, self._autocast, *self.arithmetic.dtypes}
        products = self.arithmetic.products if torch.float32 in dtypes else ()
        rounded = rounded_products(torch.device(self._device), products)
        return max(coarsest_unit(dtypes), rounded_unit(rounded))

    def add(self, module: nn.Module) -> None:
        """Looks at a module's trained parameters; from now on its first forward is watched for autocast."""
        if id(module) in self._known:
            self.open = False  # its first forward is over
            return
        self._known.add(id(module))
        self.open = True
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._dtypes.add(parameter.dtype)
                self._device = parameter.device.type
        self.look_at_autocast()

    def look_at_autocast(self) -> None:
        """Notes the precision of autocast where it is on for something that is trained."""
        if self._autocast is None and torch.is_grad_enabled() and torch.is_autocast_enabled(self._device):
            self._autocast = torch.get_autocast_dtype(self._device)

    def describe(self) -> dict[str, str | None]:
        """Returns device, parameters' dtype and autocast by name."""
        dtypes = ", ".join(sorted(short_name(dtype) for dtype in self._dtypes))
        autocast = short_name(self._autocast) if self._autocast is not None else None
        return {"device": self._device, "dtype": dtypes or "unknown", "autocast": autocast}
