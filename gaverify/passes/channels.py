"""Does a module scale its channels, as a normalisation by statistics of the batch does?"""

from __future__ import annotations

import torch

_UNEXPLAINED = 1e-5  # what a·x + b may leave over of an output before it counts as something else
_ALIKE = 1e-5  # relative spread of the slopes that rounding explains, where the forward ran in float32


def per_channel_affine(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether `after` is a·`before` + b with one (a, b) per channel, the slopes not all alike."""
    if before.shape != after.shape or before.dim() < 2 or not after.is_floating_point():
        return False
    for channel in {1, before.dim() - 1}:
        x = before.detach().movedim(channel, 0).flatten(1).double()
        y = after.detach().movedim(channel, 0).flatten(1).double()
        if x.shape[1] < 3:
            continue
        x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
        slope = (x * y).sum(1, keepdim=True) / x.square().sum(1, keepdim=True).clamp_min(1e-300)
        unexplained = (y - slope * x).norm() / y.norm().clamp_min(1e-300)
        spread = slope.std() if len(slope) > 1 else slope.abs().max()
        if float(unexplained) < _UNEXPLAINED and float(spread) > _ALIKE * float(slope.abs().max()):
            return True
    return False
