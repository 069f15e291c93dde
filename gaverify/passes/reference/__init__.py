"""The full batch's pass where memory is short: offloaded or recomputed activations, gradients on disk."""

from gaverify.passes.reference.fitting import Fitting, estimated_needs, fitted
from gaverify.passes.reference.spilling import Spilled, spilled

__all__ = ["Fitting", "Spilled", "estimated_needs", "fitted", "spilled"]
