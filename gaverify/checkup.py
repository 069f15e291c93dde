"""What `gaverify doctor` finds out: what this machine computes in, and whether known verdicts come out on it.

A green tick is believable where a control shows that a fault would have been seen: each built-in is verified with its
default batch, those that are at fault included, and its outcome and codes are held against what is known of it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from gaverify.errors import GaverifyError, text_of
from gaverify.passes.precision import available_devices, counts_memory, resolve_device, widest
from gaverify.records.comparison import Outcome
from gaverify.records.numbers import count_text
from gaverify.spec import Spec
from gaverify.verification import verify_spec
from gaverify.version import __version__, installed_version

Line = tuple[str, str, bool | None]
"""Subject, what was found, and whether it is as it should be; None where there is nothing to judge."""


@dataclass(frozen=True)
class Known:
    """A built-in with options, and the verdict that is known of it.

    Args:
        model: The built-in.
        options: Fields of `Spec`.
        outcome: On every machine and device.
        codes: Of the faults that explain it.
        needs: A package without which it is left out.
    """

    model: str
    options: dict[str, Any]
    outcome: Outcome
    codes: frozenset[str] = frozenset()
    needs: str = "torch"

    def __str__(self) -> str:
        options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in self.options.items())
        return f"{self.model}{options}"


_MEAN_OF_MEANS = frozenset({"GAV202"})

KNOWN = (
    Known("toy-linear", {"steps": 2}, Outcome.EQUIVALENT),
    Known("mlp", {}, Outcome.EQUIVALENT),
    Known("mlp", {"weighting": "none"}, Outcome.DIVERGENT, frozenset({"GAV201"})),
    Known("mlp-batchnorm", {}, Outcome.DIVERGENT, frozenset({"GAV101"})),
    Known("mnist-mlp", {}, Outcome.EQUIVALENT),
    Known("causal-lm", {}, Outcome.DIVERGENT, _MEAN_OF_MEANS),
    Known("causal-lm", {"weighting": "tokens"}, Outcome.EQUIVALENT),
    Known("gpt2", {}, Outcome.DIVERGENT, _MEAN_OF_MEANS, needs="transformers"),
    Known("gpt2", {"weighting": "tokens"}, Outcome.EQUIVALENT, needs="transformers"),
)


def versions() -> Iterator[Line]:
    """Yields what is installed."""
    yield "gaverify", __version__, None
    yield "Python", f"{platform.python_version()} on {platform.platform()}", None
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


def verify_builtin(known: Known, device: torch.device) -> Line:
    """Verifies one built-in on a device and returns how its verdict compares with what is known."""
    if find_spec(known.needs) is None:
        return str(known), f"skipped: `{known.needs}` is not installed", None
    expected = f"{known.outcome.value}{_list_codes(known.codes)}"
    try:
        verdict = verify_spec(Spec(model=known.model, device=str(device), **known.options))
    except GaverifyError as error:
        return str(known), f"{expected} expected, but: {text_of(error)}", False
    codes = frozenset(finding.code for finding in verdict.findings if finding.severity == "fault")
    actual = f"{verdict.outcome.value}{_list_codes(codes)}"
    right = (verdict.outcome, codes) == (known.outcome, known.codes)
    return str(known), f"{actual}, as expected" if right else f"{actual}; expected is {expected}", right


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


def _list_codes(codes: frozenset[str]) -> str:
    return f" ({', '.join(sorted(codes))})" if codes else ""
