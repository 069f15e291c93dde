"""The outermost modules whose forward ran: what their parameters are called, and the coarsest arithmetic in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gaverify.audit.recording.values import plain
from gaverify.passes.precision import Arithmetic, coarsest_unit, rounded_products, rounded_unit, short_name

# torch.compile, Fabric, FSDP, activation checkpointing
_WRAPPERS = ("_orig_mod", "_forward_module", "_original_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """Returns a parameter's name without what wrappers put before and between its parts."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":  # DataParallel and DDP; further inside it may be the user's own
        parts.pop(0)
    return ".".join(parts)


def paths_in(model: nn.Module, *, scripted: bool = False) -> dict[nn.Module, str]:
    """Returns the modules in a model with their plain paths; those that are scripted on request: they have no hooks."""
    kinds = () if scripted else torch.jit.ScriptModule
    return {module: plain_name(path) for path, module in model.named_modules() if not isinstance(module, kinds)}


class OutOfSight(Exception):
    """A module has nothing that could be read."""


class Names:
    """Knows the outermost modules with something to train, and what their parameters are called."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self._known: dict[int, bool] = {}
        self._names: dict[int, tuple[int, str]] = {}
        self._used: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps ids from being used again

    def add(self, module: nn.Module) -> bool:
        """Notes an outermost module; returns whether it has parameters to train.

        Raises:
            OutOfSight: Its parameters have no values that could be read: on the meta device, or still to be made.
        """
        known = self._known.get(id(module))
        if known is not None:
            return known
        if any(plain(parameter) is None for parameter in module.parameters()):
            raise OutOfSight
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if trains and not any(model is module for model in self.models):
            self.models.append(module)
        if not all(isinstance(parameter, nn.Parameter) for parameter in module.parameters()):
            return trains  # called with other weights than its own, by `functional_call`: those have no names
        self._known[id(module)] = trains
        self._kept.append(module)
        if trains:
            taken: set[str] = set()
            for name, parameter in module.named_parameters():
                short = plain_name(name) if plain_name(name) not in taken else name
                taken.add(short)
                self._names.setdefault(id(parameter), (self.index(module), short))
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
