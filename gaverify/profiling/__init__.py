"""Measures what accumulation saves and costs: memory and time against K, beside the proof that gradients agree.

`workload` and `worker` handle tensors and run in a fresh process per row, so that rows do not inherit each
other's memory. `launching` starts those and imports no torch, nor do the records and reports of a profile.
"""

from gaverify.records.profile import Memory, Plan, Profile, Row, Seconds, Setting

__all__ = ["Memory", "Plan", "Profile", "Row", "Seconds", "Setting"]
