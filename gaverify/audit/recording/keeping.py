"""Gradients as they were at a moment, kept without a copy: torch copies only what is written to afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gaverify.audit.recording.values import plain


class Kept:
    """The gradients of some parameters as they were when this was made.

    Each is a lazy clone, which shares its memory with the gradient until one of the two is written to. So keeping costs
    nothing where nothing changes the gradients, and one more set of them where clipping, say, does.

    Args:
        parameters: Those whose `.grad` is kept.
        sampled: A few elements of all of them, as `Sample.gradients` reads them.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], sampled: torch.Tensor) -> None:
        self.sampled = sampled
        self.gradients = [None if parameter.grad is None else frozen(parameter.grad) for parameter in parameters]

    def differs(self, parameters: Sequence[torch.Tensor], sampled: torch.Tensor) -> bool:
        """Whether any element of the gradients has changed since.

        Args:
            parameters: The same parameters.
            sampled: The same elements as they are now.
        """
        if not torch.equal(sampled, self.sampled):
            return True
        unequal: dict[torch.device, list[torch.Tensor]] = {}
        for parameter, kept in zip(parameters, self.gradients, strict=True):
            now = None if parameter.grad is None else plain(parameter.grad)
            if now is None or kept is None:
                if (now is None) != (kept is None):
                    return True
            elif not shared(now, kept):
                if now.shape != kept.shape or now.layout is not kept.layout or now.dtype is not kept.dtype:
                    return True
                if now.layout is torch.strided:
                    unequal.setdefault(now.device, []).append((now != kept).any())
        return any(bool(torch.stack(found).any()) for found in unequal.values())  # one transfer per device


def frozen(gradient: torch.Tensor) -> torch.Tensor | None:
    """Returns values as they are now: a lazy clone where that is possible; None where there is nothing to read."""
    values = plain(gradient)
    if values is None:
        return None
    try:
        return torch._lazy_clone(values) if values.layout is torch.strided else values.clone()
    except (RuntimeError, AttributeError):  # memory that torch does not own, or a device without lazy clones
        return values.clone()


def shared(now: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether a lazy clone still shares its memory, because neither side was written to."""
    if not hasattr(torch._C, "_is_cow_tensor") or not torch._C._is_cow_tensor(now):
        return False
    address = torch._C._data_address  # type: ignore[attr-defined]
    return bool(address(now) == address(kept))
