"""What can be read of a script's tensors, and when nothing can be (shadows, transforms, traces); and copies."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from gaverify.passes.calls import in_transform
from gaverify.passes.nesting import leaves

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


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested containers, in order."""
    return [leaf for _, leaf in leaves(nested, "") if isinstance(leaf, torch.Tensor)]


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


class Kept:
    """The gradients of some parameters as they were when this was made.

    Each is a copy: one more set of them from the last backward pass to the step. Torch's lazy clones share memory until
    one side is written to, but CUDA's fused kernels (clipping, unscaling, optimizers) write without asking; what was
    kept would be the clipped gradient, and a forgotten division would be equivalent.

    Args:
        parameters: Those whose `.grad` is kept.
        sampled: A few elements of all of them, as `Sample.gradients` reads them.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], sampled: torch.Tensor) -> None:
        self.sampled = sampled
        self.gradients = [None if parameter.grad is None else copied(parameter.grad) for parameter in parameters]

    def differs(self, gradients: Sequence[torch.Tensor | None], sampled: torch.Tensor) -> bool:
        """Whether any element of the gradients has changed since; NaN that stays NaN has not.

        Args:
            gradients: Those of the same parameters as they are later.
            sampled: The same elements of them.
        """
        if not torch.equal(sampled, self.sampled):
            return True
        unequal: dict[torch.device, list[torch.Tensor]] = {}
        for now, kept in zip(gradients, self.gradients, strict=True):
            if now is None or kept is None:
                if (now is None) != (kept is None):
                    return True
            else:
                if now.shape != kept.shape or now.layout is not kept.layout or now.dtype is not kept.dtype:
                    return True
                if now.layout is torch.strided:
                    unequal.setdefault(now.device, []).append(((now != kept) & ((now == now) | (kept == kept))).any())
        return any(bool(torch.stack(found).any()) for found in unequal.values())  # one transfer per device


def copied(gradient: torch.Tensor) -> torch.Tensor | None:
    """Returns values as they are now; None where there is nothing to read."""
    values = plain(gradient)
    return None if values is None else values.clone()


def same(before: torch.Tensor | None, now: torch.Tensor) -> bool:
    """Whether values are what they were, of the same shape and type."""
    if before is None or before.shape != now.shape or before.dtype is not now.dtype:
        return False
    return torch.equal(before, now)
