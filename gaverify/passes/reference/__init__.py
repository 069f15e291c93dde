"""The full batch's pass where memory is short: offloaded or recomputed activations."""

from gaverify.passes.reference.fitting import Fitting, estimated_needs, fitted

__all__ = ["Fitting", "estimated_needs", "fitted"]
