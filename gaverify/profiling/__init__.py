"""What accumulation buys on this model and machine: memory and time against K, beside the proof that gradients agree.

The package has two sides. The *worker* side (`activations`, `workload`, `measuring`, `worker`) handles tensors and runs
in a fresh process per row, so that rows do not inherit each other's memory. Everything else (`records`, `fitting`,
`launching`, `document`, `schema`, `table`, `plot`) handles frozen records and imports no torch.
"""

from gaverify.records.profile import Memory, Plan, Profile, Row, Seconds, Setting

__all__ = ["Memory", "Plan", "Profile", "Row", "Seconds", "Setting"]
