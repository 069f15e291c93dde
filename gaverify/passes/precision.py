"""Devices and arithmetic: the words for devices, what they compute in, conversions for a control, moved weights."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from operator import floordiv
from typing import Any

import torch
from torch import nn

from gaverify.errors import ProblemError
from gaverify.passes.wrappers import renew_reducers, shards_in
from gaverify.thresholds import FEWEST_MULTIPLICATIONS, MANY_UNITS
from gaverify.torch_internals import buffers_of, fp32_precision_accessors, is_in_backward, parameters_of
from gaverify.tracebacks import hands_over

# Devices: the words for them, the generators that they draw from, and what they can compute in.
#
# Nothing else in gaverify asks for an accelerator by its name, but where a switch or a kernel of torch's has one.


ACCELERATORS = ("cuda", "xpu", "mps")
"""Kinds of accelerators that torch has a module of, the one that `auto` prefers first; ROCm's answer to `cuda`."""

RANKED = ("cpu", "cuda")
"""Kinds of devices that gloo and NCCL know."""


def _module(kind: str) -> Any:
    return getattr(torch, kind, None)


def _is_available(kind: str) -> bool:
    module = _module(kind)
    return module is not None and bool(module.is_available())


def _is_initialised(kind: str) -> bool:
    """Whether a kind is in use already. Asked before whether it is there: that alone makes a later fork fail."""
    module = _module(kind)
    # Asking a CUDA that is not in use for its devices would initialise it, and no process could be forked any more.
    if hasattr(module, "is_initialized"):
        return bool(module.is_initialized())
    return _is_available(kind)


def _devices_of(kind: str) -> list[torch.device]:
    if kind == "mps":
        return [torch.device(kind)]
    return [torch.device(kind, index) for index in range(_module(kind).device_count())]


def widest(device: torch.device) -> torch.dtype:
    """Returns the most precise real dtype that a device computes in."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


def counts_memory(device: torch.device) -> bool:
    """Whether torch counts what is allocated on a device, and has events to time it by."""
    return device.type in ("cuda", "xpu")


def return_freed() -> None:
    """Gives freed memory back to the system: glibc keeps it, in pieces that fit nothing larger."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def available_devices() -> tuple[str, ...]:
    """Returns the device words that work on this machine."""
    return ("cpu", *(str(device) for kind in ACCELERATORS if _is_available(kind) for device in _devices_of(kind)))


def resolve_device(word: str | torch.device | None) -> torch.device | None:
    """Returns the device that `word` names; None stays None (where the model is).

    Raises:
        ProblemError: It is not a device, or not on this machine; the message says which are.
    """
    if word is None:
        return None
    names = available_devices()
    if word == "auto":
        return torch.device(names[1] if len(names) > 1 else "cpu")
    try:
        device = torch.device(word)
    except (RuntimeError, TypeError) as error:
        raise ProblemError(f"unknown device `{word}`; write {', '.join(names)} or auto") from error
    if any(name.partition(":")[0] == device.type for name in names):
        device = with_number(device)
    if str(device) not in names:
        raise ProblemError(f"this machine has no device `{word}`; write {', '.join(names)} or auto")
    return device


def with_number(device: torch.device) -> torch.device:
    """Returns the device that `cuda` means: the current one of its kind. Kinds without numbers stay as they are."""
    if device.index is not None or device.type not in ("cuda", "xpu"):
        return torch.device(device.type) if device.type in ("cpu", "mps") else device
    return torch.device(device.type, _module(device.type).current_device())


def select_device(device: torch.device) -> None:
    """Makes a device the one that its kind's name means in this process, as launchers of ranks do."""
    if device.type in ("cuda", "xpu"):
        _module(device.type).set_device(device)


def devices_of_ranks(kind: str, count: int) -> list[torch.device]:
    """Returns the device of each of R ranks: one of its own, as far as there are enough of the kind."""
    if kind == "cpu":
        return [torch.device(kind)] * count
    # More ranks than devices share them in turn: gloo allows it, NCCL does not (`backend_of`).
    available = _devices_of(kind)
    return [available[rank % len(available)] for rank in range(count)]


def backend_of(devices: Sequence[torch.device]) -> str:
    """Returns what ranks on these devices talk through: NCCL, which refuses two of them on one, else gloo."""
    one_each = devices[0].type == "cuda" and len(set(devices)) == len(devices) and torch.distributed.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if one_each else "gloo"


def generators_in_use() -> dict[torch.device, torch.Generator]:
    """Returns the default generators that may have been drawn from: the CPU's, and those of accelerators in use."""
    devices = [device for kind in ACCELERATORS if _is_initialised(kind) for device in _devices_of(kind)]
    return {device: default_generator(device) for device in (torch.device("cpu"), *devices)}


def default_generator(device: torch.device) -> torch.Generator:
    """Returns the generator that operations on a device in use draw from unless they are given another."""
    if device.type == "cpu":
        return torch.default_generator
    module = _module(device.type)
    generator: torch.Generator = (
        module._get_default_mps_generator() if device.type == "mps" else module.default_generators[device.index]
    )
    return generator


# Which arithmetic gradients are computed in, the conversion of a model for a control run, and moved weights.
#
#     w ← w · (1 ± share)        each element with a random sign of its own
#
# Weights move by their roundoff for a noise floor, and by more for a second point to look from.


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def unit_roundoff(dtype: torch.dtype) -> float:
    """Returns u = eps / 2 of a floating-point or complex dtype.

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.2.
    """
    return torch.finfo(dtype).eps / 2


def coarsest_unit(dtypes: Iterable[torch.dtype | None]) -> float:
    """Returns the largest unit roundoff of the types that have one; 0 where none has."""
    real = (dtype for dtype in dtypes if dtype is not None and (dtype.is_floating_point or dtype.is_complex))
    return max(map(unit_roundoff, real), default=0.0)


def buffers_differ(ours: torch.Tensor, full: torch.Tensor, unit: float) -> bool:
    """Whether a buffer is further from another one than the rounding of what it averages; NaN counts as no distance.

    Args:
        ours: The buffer of one run or rank.
        full: The same of the other.
        unit: Unit roundoff u of the arithmetic that they were computed in.
    """
    if ours.shape != full.shape:
        return True
    ours, full = (part.to_dense() if part.layout is not torch.strided else part for part in (ours, full))
    # The larger norm counts: a moving average that starts at zero is small in one run and large in the other.
    difference, *sizes = (float(torch.linalg.vector_norm(part.double())) for part in (ours - full, ours, full))
    return difference > MANY_UNITS * unit * max(sizes)


def buffers_apart(copies: Sequence[Mapping[str, torch.Tensor]], unit: float) -> tuple[str, ...]:
    """Returns the names of the first rank's buffers that differ from those of another one, in its order.

    Args:
        copies: The buffers of each rank by name.
        unit: Unit roundoff u of the arithmetic that they were computed in.
    """
    first, *later_copies = copies
    return tuple(
        name
        for name, value in first.items()
        if any(name in later_copy and buffers_differ(later_copy[name], value, unit) for later_copy in later_copies)
    )


PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"), "matmul"),
    **dict.fromkeys(("aten::convolution", "aten::convolution_backward"), "conv"),
    "aten::_cudnn_rnn": "rnn",
}
"""Operations whose float32 inputs torch may round before it multiplies them, by the switch that decides it."""
_SHORTER = {"tf32": 2.0**-11, "bf16": 2.0**-8}
_BACKENDS = {"cuda": "cuda", "cpu": "mkldnn"}


@cache
def product_of(func: Any) -> str:
    """Returns the switch that decides about an operation of `PRODUCTS`; "" for any other."""
    return PRODUCTS.get(func._schema.name, "")


@dataclass
class Arithmetic:
    """The products that ran, and the types of those that carried gradients.

    A product of a backward pass has the type that gradients are computed in there, whoever chose it: the weight's own,
    autocast, a wrapper that casts, the frozen base under an adapter. A teacher that only runs beside it is in none.
    """

    products: set[str] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)
    operations: int = 0
    """How many operations ran."""
    work: int = 0
    """Multiplications of the forward's products, and at least those that take as long as to write the result."""

    def note(self, product: str, args: tuple[Any, ...]) -> None:
        """Notes an operation, given what `product_of` says about it; one without gradients takes no part in them."""
        self.operations += 1
        backward = bool(product) and is_in_backward()
        # The backward's type, not the forward's: autocast and wrappers choose it there.
        if backward:
            self.dtypes.add(args[0].dtype)
        if backward or (product and torch.is_grad_enabled()):
            self.products.add(product)
        if product and not backward:
            self.work += _count_work(product, args)


def _count_work(product: str, args: tuple[Any, ...]) -> int:
    """The multiplications of a product, by its arguments' shapes; 0 where its samples have different ones."""
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    if any(each.is_nested for each in tensors):
        return 0
    elements: int
    inner: int
    if product == "rnn":
        elements, inner = math.prod(tensors[0].shape[:-1]), sum(math.prod(weight.shape) for weight in args[1])
    elif product == "conv":
        images, weight = tensors[:2]
        stride, is_transposed = args[3], args[6]
        inner = math.prod(weight.shape[1:])
        if is_transposed:
            return math.prod(images.shape) * inner
        elements = len(images) * len(weight) * math.prod(map(floordiv, images.shape[2:], stride))
    else:
        first, second = tensors[-2:]
        inner = first.shape[-1]
        elements = math.prod(first.shape[:-1]) * second.shape[-1]
    return elements * max(inner, FEWEST_MULTIPLICATIONS)


def rounded_products(device: torch.device, products: Collection[str]) -> dict[str, str]:
    """Returns which kinds of products round their float32 inputs on a device, and to what: {"matmul": "tf32"}.

    Torch's switches allow it (`torch.backends.cuda.matmul.fp32_precision`, `allow_tf32`); hardware without the format
    goes on in float32.
    """
    accessors = fp32_precision_accessors()
    backend = _BACKENDS.get(device.type)
    if backend is None:
        return {}
    if accessors is None:  # torch before 2.9
        older = {"matmul": torch.backends.cuda.matmul.allow_tf32, "conv": torch.backends.cudnn.allow_tf32}
        return {kind: "tf32" for kind in sorted(products) if device.type == "cuda" and older.get(kind)}
    precisions = {kind: str(accessors[0](backend, kind)) for kind in sorted(products)}
    return {kind: precision for kind, precision in precisions.items() if precision in _SHORTER}


def rounded_unit(rounded: Mapping[str, str]) -> float:
    """Returns the unit roundoff of the coarsest of `rounded_products`; 0 where there are none.

    TF32 keeps 10 bits behind the point, bfloat16 7: u = 2⁻¹¹ and 2⁻⁸.
    Source: NVIDIA A100 Tensor Core GPU Architecture, 2020; IEEE 754 rounding to nearest.
    """
    return max((_SHORTER[precision] for precision in rounded.values()), default=0.0)


def short_name(dtype: torch.dtype) -> str:
    """Returns `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_like(current: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Returns what `current` becomes when a model is asked for the real dtype `wanted`; integers stay."""
    if wanted is None or not (current.is_floating_point or current.is_complex):
        return current
    if not current.is_complex:
        return wanted
    return torch.complex128 if wanted is torch.float64 else torch.complex64


@contextmanager
@hands_over  # tensor subclasses of the user's decide what `to` does
def convert_weights(
    modules: list[nn.Module],
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    weights: bool = True,
) -> Iterator[None]:
    """Holds parameters and buffers on another device or in another precision, and puts the originals back in the end.

    Where `weights` is false, the parameters stay as they are.

    The tensors are exchanged inside the user's own `Parameter` objects rather than in a copy of the model: ties,
    hooks, and closures that hold a parameter keep working, and a model that cannot be deep-copied can be converted.
    Raising the precision is exact, so the originals come back bit for bit.
    """
    originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with shards_in(modules, dtype if weights else None):
        try:
            for module in (module for root in modules for module in root.modules()):
                for tensor in [*(parameters_of(module).values() if weights else ()), *buffers_of(module).values()]:
                    if tensor is None or id(tensor) in originals:
                        continue
                    target = dtype_like(tensor.dtype, dtype)
                    moved = tensor.data.to(device=device or tensor.device, dtype=target)
                    if moved is not tensor.data and (moved.dtype != tensor.dtype or moved.device != tensor.device):
                        originals[id(tensor)] = (tensor, tensor.data)
                        # Through `.data`, so that autograd and the optimizer go on seeing the same parameter.
                        tensor.data = moved
            if originals:
                renew_reducers(modules, hooks=False)
            yield
        finally:
            for tensor, data in originals.values():
                tensor.grad = None  # a gradient of the other precision cannot stay beside the original data
                tensor.data = data
            if originals:
                renew_reducers(modules, hooks=True)


def rounding_share(parameter: torch.Tensor, unit: float) -> float:
    """Returns 2 u: as a share of a weight, one to two units in its last place.

    A move by u alone would be half a unit in the last place of some weights, and round back to where they were.

    Args:
        parameter: The weight, whose own dtype may be coarser than the rest.
        unit: Unit roundoff u of the coarsest arithmetic that takes part.
    """
    return 2.0 * max(unit, unit_roundoff(parameter.dtype))


class Coins:
    """Coins from one seed, thrown where the weights lie: nothing waits for a copy of them.

    Args:
        seed: Every device starts from it.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def random_signs(self, like: torch.Tensor) -> torch.Tensor:
        """Returns -1 or 1 for every element of a real tensor."""
        device = like.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        # Not by `torch.sign` of normal numbers: zero would be a third side. A byte each, because a weight may be large.
        sides = torch.randint(0, 2, like.shape, generator=self._generators[device], dtype=torch.int8, device=device)
        return sides.mul_(2).sub_(1)


@torch.no_grad()
def move(parameter: torch.Tensor, share: float, coins: Coins) -> None:
    """Moves each element of a parameter up or down by a share of itself, in place; complex ones part by part."""
    data: Any = parameter.data
    if hasattr(data, "to_local"):  # a sharded parameter: each process moves its own part
        data = data.to_local()
    real = torch.view_as_real(data) if data.is_complex() else data
    real.add_(real * coins.random_signs(real), alpha=share)


@contextmanager
def move_weights(parameters: Sequence[torch.Tensor], shares: Sequence[float], seed: int = 0) -> Iterator[None]:
    """Holds parameters moved by a share of themselves each, and puts them back bit for bit.

    Args:
        parameters: The parameters to move.
        shares: By how much each; `rounding_share` for a noise floor.
        seed: The seed of the random signs.
    """
    saved = [parameter.detach().clone() for parameter in parameters]
    coins = Coins(seed)
    try:
        for parameter, share in zip(parameters, shares, strict=True):
            move(parameter, share, coins)
        yield
    finally:
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.data.copy_(value)
