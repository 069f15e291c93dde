"""What can be read of a script's tensors, and when nothing can be: shadows of tensors, transforms, traces."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from gaverify.passes.modes import in_transform

CAPTURED = "CUDA graph capture, whose replays are seen at the optimizer's steps alone"
"""Stands among what hides calls."""


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a tensor's own values as an ordinary tensor that shares its memory; None where it has none to read.

    A `DTensor` gives the shard of this process. Tensors on the meta device, fake ones, those of a running transform
    (`torch.func`), parameters that a lazy module has yet to make, and nested or quantised layouts have nothing to read.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        if hasattr(tensor, "trigger_wait"):  # a collective that is still under way
            tensor = tensor.trigger_wait()
        if is_lazy(tensor) or hasattr(tensor, "__tensor_flatten__") or _is_fake(tensor):
            return None  # its values are still to be made, lie in other tensors, or are nowhere
        tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized or _in_a_transform(tensor):
        return None
    return tensor.detach()


def out_of_sight() -> str:
    """Returns why calls cannot be recorded at this moment: the name of what is running; empty where nothing is."""
    if in_transform():
        return "torch.func"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return CAPTURED  # nothing may be copied to the host, and nothing is computed yet
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
        return "fake tensors"
    return ""


def on_meta(tensors: Any) -> bool:
    """Whether a tensor, or one of several, lies on the meta device: what is done with it counts operations at most."""
    several = tensors if isinstance(tensors, list | tuple) else (tensors,)
    return any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in several)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Runs the recorder's own operations on plain tensors: no mode of the script sees them or decides their device."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if not torch._C._len_torch_dispatch_stack():
            yield
            return
        with _disable_current_modes():
            yield


def _in_a_transform(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _is_fake(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch._subclasses.fake_tensor")  # where nobody imported it there are none
    return module is not None and isinstance(tensor, module.FakeTensor)
