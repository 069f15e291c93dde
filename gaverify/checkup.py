"""The answers of `gaverify doctor`: which packages are installed, and in which precision each device computes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

import torch

from gaverify.errors import text_of
from gaverify.passes.precision import available_devices, counts_memory, resolve_device, widest
from gaverify.records.numbers import count_text
from gaverify.version import __version__, installed_version

Line = tuple[str, str, bool | None]
"""Subject, what was found, and whether it is as it should be; None where there is nothing to judge."""


def versions() -> Iterator[Line]:
    """Yields what is installed."""
    yield "gaverify", __version__, None
    # In two words: a narrow terminal cuts one that does not fit its line.
    system = platform.platform().replace("-with-", " with ")
    yield "Python", f"{platform.python_version()} on {system}", None
    kernels = torch.backends.cpu.get_cpu_capability()  # what torch's CPU kernels are compiled for, such as AVX2
    yield "torch", f"{torch.__version__}, {count_text(torch.get_num_threads(), 'thread')}, {kernels}", None
    for package, use in (
        ("transformers", "the built-in gpt2, models by folder or name"),
        ("numpy", "arrays in batches"),
    ):
        yield package, f"{installed_version(package)} ({use})", None


def devices(word: str | None) -> tuple[torch.device, ...]:
    """Returns the devices to examine: the one that is asked for, or one of each kind on this machine."""
    if word is not None:
        return (resolve_device(word) or torch.device("cpu"),)
    kinds: dict[str, torch.device] = {}
    for name in available_devices():
        kinds.setdefault(torch.device(name).type, torch.device(name))
    return tuple(kinds.values())


def support(device: torch.device) -> Iterator[Line]:
    """Yields what a device can do that a verdict rests on: float64, and the same result for the same work."""
    yield f"{device}", _name(device), None
    if widest(device) is torch.float64:
        yield from _attempt_check("float64", "for float64 checks", lambda: _backward(device, torch.float64) is not None)
    else:
        yield "float64", "not on this device: float64 checks run on the CPU", None
    yield from _attempt_check("repeatable", "the same backward twice, bit for bit", lambda: _repeats(device))
    yield from _attempt_check(
        "deterministic", "torch's deterministic algorithms", lambda: _repeats(device, deterministic=True)
    )


def _attempt_check(subject: str, what: str, attempt: Callable[[], bool]) -> Iterator[Line]:
    try:
        fine = attempt()
    except RuntimeError as error:
        yield subject, f"{what}: {text_of(error).splitlines()[0]}", False
    else:
        yield subject, f"{what}: {'yes' if fine else 'no'}", fine


def _backward(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns the gradient of a small convolution, drawn anew from the same seed."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, 3, 3, generator=generator, dtype=dtype, device="cpu").to(device).requires_grad_()
    inputs = torch.randn(8, 3, 9, 9, generator=generator, dtype=dtype, device="cpu").to(device)
    torch.nn.functional.conv2d(inputs, weight).square().mean().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return weight.grad


def _repeats(device: torch.device, *, deterministic: bool = False) -> bool:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(deterministic or before)
        return torch.equal(_backward(device, torch.float32), _backward(device, torch.float32))
    finally:
        torch.use_deterministic_algorithms(before)


def _name(device: torch.device) -> str:
    if counts_memory(device):
        properties = torch.get_device_module(device).get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return platform.processor() or platform.machine()
