"""Is this batch able to tell?"""

from __future__ import annotations

from typing import Any

import torch

from gaverify.passes.nesting import leaves


def identical_samples(batch: Any, batch_size: int) -> bool:
    """Returns whether all samples of the batch are the same, so that no coupling between them could show."""
    compared = False
    for _, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            return False  # samples of lengths of their own
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.dim() > 0:
            if leaf.shape[0] != batch_size or batch_size < 2:
                return False
            if not bool((leaf == leaf[:1]).all()):
                return False
            compared = True
    return compared
