"""Repairs that can be used as they are: weights, a BatchNorm converter, a cached-gradient step, a gather over ranks.

Each is what a finding's remedy names, and each needs nothing but torch and the model.
"""

from __future__ import annotations

from gaverify.remedies.batch_norm import convert_batch_norm
from gaverify.remedies.cached import CachedGradients
from gaverify.remedies.shares import all_gather, token_weights, valid_targets

__all__ = ["CachedGradients", "all_gather", "convert_batch_norm", "token_weights", "valid_targets"]
