"""Reads a script's tensors and models: values, a few elements of every parameter, names, arithmetic.

Nothing can be read of tensors without values (meta, fake), and nothing inside transforms and traces. Every run reads
the same few elements of a parameter: enough to fit weights and to see that something changed. A linear relation between
gradients holds for every element, hence for any choice of them.

Shapes: S sampled elements of all parameters of one optimizer, laid end to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gaverify.passes.layouts import leaves
from gaverify.passes.precision import Arithmetic, coarsest_unit, rounded_products, rounded_unit, short_name
from gaverify.passes.wrappers import is_sharded, offset_of_shard
from gaverify.records.events import ArithmeticSummary, Shard
from gaverify.torch_internals import (
    is_fake,
    is_functorch_tensor,
    is_in_fake_mode,
    is_in_functorch_transform,
    is_traced_by_jit,
    without_active_modes,
    without_torch_function,
)

CAPTURED = "CUDA graph capture, whose replays are seen only at optimizer steps"
"""The reason that is reported for calls that could not be recorded during a capture."""


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a tensor's own values as an ordinary tensor that shares its memory; None where it has none to read.

    A `DTensor` gives the shard of this process. Tensors on the meta device, fake ones, and those of a running transform
    (`torch.func`) have nothing to read. Nor do parameters that a lazy module has yet to make, and nested or quantised
    layouts.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        if hasattr(tensor, "trigger_wait"):  # a collective that is still under way
            tensor = tensor.trigger_wait()
        if is_lazy(tensor) or hasattr(tensor, "__tensor_flatten__") or is_fake(tensor):
            return None  # its values are still to be made, lie in other tensors, or are nowhere
        tensor = tensor.detach().as_subclass(torch.Tensor)
    transformed = is_functorch_tensor(tensor)
    return None if transformed or tensor.is_meta or tensor.is_nested or tensor.is_quantized else tensor.detach()


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested containers, in order."""
    return [leaf for _, leaf in leaves(nested, "") if isinstance(leaf, torch.Tensor)]


def out_of_sight() -> str:
    """Returns why calls cannot be recorded at this moment: the name of what is running; empty where nothing is."""
    if is_in_functorch_transform():
        return "torch.func"
    if is_traced_by_jit():
        return "torch.jit.trace"
    # The first question protects the second: a build without CUDA cannot be asked about streams.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return CAPTURED  # nothing may be copied to the host, and nothing is computed yet
    if is_in_fake_mode():
        return "fake tensors"
    return ""


def on_meta(tensors: Any) -> bool:
    """Whether a tensor, or one of several, lies on the meta device, on which scripts at most count operations."""
    several = tensors if isinstance(tensors, list | tuple) else (tensors,)
    return any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in several)


@contextmanager
def suspend_modes() -> Iterator[None]:
    """Runs the recorder's own operations on plain tensors: no mode of the script sees them or decides their device."""
    modes = without_active_modes()
    with without_torch_function(), torch.no_grad(), modes:
        yield


def copy_values(gradient: torch.Tensor) -> torch.Tensor | None:
    """Returns values as they are now; None where there is nothing to read."""
    values = plain(gradient)
    return None if values is None else values.clone()


def same(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    """Whether values are what they were, of the same shape and type; NaN equals NaN. Other layouts are not read."""
    if before is None or now is None:
        return before is now
    if before.shape != now.shape or before.layout is not now.layout or before.dtype is not now.dtype:
        return False
    if before.layout is not torch.strided or torch.equal(before, now):
        return True
    # NaN is unequal to itself, so both sides get the same number in its place.
    return torch.equal(before.nan_to_num(7.0), now.nan_to_num(7.0))


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
        readable = [plain(parameter) for parameter in parameters]
        self.complete = all(values is not None for values in readable)
        self._counts = [0 if values is None else values.numel() for values in readable]
        total = sum(self._counts)
        self._positions = [
            positions(at, count, total).to("cpu" if values is None else values.device)
            for at, (values, count) in enumerate(zip(readable, self._counts, strict=True))
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

    def gradients_from_whole(self) -> torch.Tensor | None:
        """Returns the elements of the gradients that a process with whole parameters chooses, as `read` does.

        They are zero where this process does not hold them, so that those of all shards add up; None without shards.
        """
        if not any(map(is_sharded, self.parameters)):
            return None
        counts = [math.prod(parameter.shape) for parameter in self.parameters]
        parts = []
        for at, parameter in enumerate(self.parameters):
            chosen = positions(at, counts[at], sum(counts))
            is_held, places = places_in_shard(chosen, parameter.shape, shard_of(parameter))
            part = torch.zeros(len(chosen), dtype=torch.float64, device="cpu")
            part[is_held] = read([(parameter.grad, places)])[0]
            parts.append(part)
        return torch.cat(parts)

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
    # One transfer instead of one per parameter: each waits for the device.
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
    # A generator of its own: the script's must not move, and all runs must read the same elements.
    generator = torch.Generator().manual_seed(ordinal)
    starts = (
        torch.randint(max(numel // _RUN, 1), (-(-wanted // _RUN),), generator=generator, device="cpu").sort().values
        * _RUN
    )
    return (starts[:, None] + torch.arange(_RUN, device="cpu")).flatten().clamp_max(numel - 1)


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Returns the piece of a parameter that this process holds; None where it holds all of it."""
    data: Any = parameter.data
    return Shard(offset_of_shard(data), tuple(data.to_local().shape)) if is_sharded(data) else None


def places_in_shard(
    chosen: torch.Tensor, shape: Sequence[int], shard: Shard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which positions of a whole parameter lie in a piece of it, and where these are in the piece."""
    if shard is None:
        return torch.ones(len(chosen), dtype=torch.bool, device="cpu"), chosen
    is_held = torch.ones(len(chosen), dtype=torch.bool, device="cpu")
    places = torch.zeros_like(chosen)
    for index, offset, size in zip(torch.unravel_index(chosen, tuple(shape)), shard.offset, shard.shape, strict=True):
        is_held &= (index >= offset) & (index < offset + size)
        places = places * size + index - offset
    return is_held, places[is_held]


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
    """The parameters of a module have no values that could be read."""


class Names:
    """Knows the outermost modules with something to train, and what their parameters are called."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self._known: dict[int, tuple[nn.Module, bool]] = {}  # by id; held, so that no other one gets it
        self._names: dict[int, tuple[int, str]] = {}
        self._used: dict[int, int] = {}

    def add(self, module: nn.Module) -> bool:
        """Notes an outermost module; returns whether it has parameters to train.

        Raises:
            OutOfSight: Its parameters have no values that could be read: on the meta device, or still to be made.
        """
        if self._known.get(id(module), (None, False))[1]:
            return True  # one that was frozen when it was met (a critic in its generator's loss) may train by now
        if any(plain(parameter) is None for parameter in module.parameters()):
            raise OutOfSight
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if trains and not any(model is module for model in self.models):
            self.models.append(module)
        if not all(isinstance(parameter, nn.Parameter) for parameter in module.parameters()):
            return trains  # called with other weights than its own, by `functional_call`: those have no names
        self._known[id(module)] = module, trains
        if trains:
            taken: set[str] = set()
            for name, parameter in module.named_parameters():
                # Without wrappers two names may be the same; the second parameter keeps its full name.
                short = plain_name(name) if plain_name(name) not in taken else name
                taken.add(short)
                self._names.setdefault(id(parameter), (self.index(module), short))
        return trains

    def models_of(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Returns the positions of the noted modules that hold some parameters, as `index` gives them."""
        return sorted({self._names[id(each)][0] for each in parameters if id(each) in self._names})

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
        named = ((str(at), *pair) for at, model in enumerate(self.models) for pair in model.named_buffers())
        return {f"{at}:{plain_name(name)}": buffer for at, name, buffer in named}

    def is_part(self, module: nn.Module) -> bool:
        """Whether a module is a noted one, lies in one, or holds parameters of one."""
        is_inner = any(module is inner for model in self.models for inner in model.modules())
        return is_inner or any(id(parameter) in self._names for parameter in module.parameters())

    def prefix(self, module: nn.Module) -> str:
        """Returns what stands before the names of a module's values: nothing for a model, else its class."""
        return "" if any(model is module for model in self.models) else f"{type(module).__name__}."


class Roundoff:
    """The precision of all that gradients pass through: parameters, autocast, products of backward passes, reductions.

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
        # TF32 and bfloat16 round the inputs of float32 products only.
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
        # An evaluation under autocast carries no gradients.
        if self._autocast is None and torch.is_grad_enabled() and torch.is_autocast_enabled(self._device):
            self._autocast = torch.get_autocast_dtype(self._device)

    def describe(self) -> ArithmeticSummary:
        """Returns what was seen, for the closing record."""
        dtypes = ", ".join(sorted(short_name(dtype) for dtype in self._dtypes))
        autocast = short_name(self._autocast) if self._autocast is not None else None
        return ArithmeticSummary(self.unit, self._device, dtypes or "unknown", autocast)


def place_in_group() -> tuple[int, int]:
    """Returns this process's rank and how many train together: (0, 1) where no process group was initialised."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
