"""Unit roundoffs, and the conversion of a model to another precision for the length of a control run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gaverify.batching import dtype_like

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


def short_name(dtype: torch.dtype) -> str:
    """Returns `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def converted(
    modules: list[nn.Module], *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Holds parameters and buffers on another device or in another precision, and puts the originals back in the end.

    The tensors are exchanged inside the user's own `Parameter` objects rather than in a copy of the model: ties,
    hooks, and closures that hold a parameter keep working, and a model that cannot be deep-copied can be converted.
    Raising the precision is exact, so the originals come back bit for bit.
    """
    originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    try:
        for module in (module for root in modules for module in root.modules()):
            for tensor in [*module._parameters.values(), *module._buffers.values()]:
                if tensor is None or id(tensor) in originals:
                    continue
                target = dtype_like(tensor.dtype, dtype)
                moved = tensor.data.to(device=device or tensor.device, dtype=target)
                if moved is not tensor.data and (moved.dtype != tensor.dtype or moved.device != tensor.device):
                    originals[id(tensor)] = (tensor, tensor.data)
                    tensor.data = moved
        yield
    finally:
        for tensor, data in originals.values():
            tensor.grad = None  # a gradient of the other precision cannot stay beside the original data
            tensor.data = data
