"""Devices: the words for them, the generators that they draw from, and what they can compute in.

Nothing else in gaverify asks for an accelerator by its name, but where a switch or a kernel of torch's has one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from gaverify.errors import ProblemError

ACCELERATORS = ("cuda", "xpu", "mps")
"""Kinds of accelerators that torch has a module of, the one that `auto` prefers first; ROCm's answer to `cuda`."""

RANKED = ("cpu", "cuda")
"""Kinds of devices that gloo and NCCL know."""


def _module(kind: str) -> Any:
    return getattr(torch, kind, None)


def _is_available(kind: str) -> bool:
    module = _module(kind)
    if kind == "mps" and not hasattr(module, "is_available"):  # torch 2.4 and 2.5 tell it elsewhere
        return torch.backends.mps.is_available()
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
