"""Gradients as they were at a moment."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gaverify.audit.recording.values import plain


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
