"""GAV502 missing-gradient: a parameter has a gradient in one run and None in the other.

What it finds

A parameter that takes part in the full batch's loss and in none of the micro-batches', or the other way round:
heads and auxiliary losses that are switched on by the batch's size, experts or branches chosen for the batch as a
whole.

Why gradients diverge

The graph itself depends on the batch, so that the two losses are different functions of the parameters. `None` is
not zero: an optimizer skips a parameter whose gradient is None, while with a zero gradient weight decay, momentum
and Adam's moving averages go on. `DistributedDataParallel` waits for the gradient that never comes.

Signature in the numbers

- One side has no number to compare; the table says `no gradient (None)` and in which run.
- Other parameters may agree to rounding.

Example

    import torch
    from torch import nn

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.extra = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            if len(x) < 8:
                return self.head(x)
            return self.head(x) + 0.1 * self.extra(x)

    model = Heads()
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

Use instead

Branches that depend on a sample or on a setting, never on how many samples came together.

    import torch
    from torch import nn

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.extra = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(x) + 0.1 * self.extra(x)

    model = Heads()
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

When it is harmless

A parameter that no run uses is None on both sides and not reported. An expert that no sample of this batch reaches
is None on both sides as well.

References

- PyTorch, Optimizer.zero_grad (None against zero),
  https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
- PyTorch, DistributedDataParallel (`find_unused_parameters`),
  https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.diagnosis.wording import count
from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding, Location

CODE, NAME = "GAV502", "missing-gradient"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where a parameter has a gradient on one side only."""
    rows = [row for row in measured.rows if math.isnan(row.difference_norm) and row.reason.startswith("no gradient")]
    if not rows:
        return
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    yield Finding(
        CODE, NAME, "fault", f"`{rows[0].name}`{more} {'have' if more else 'has'} {rows[0].reason}",
        location=Location(rows[0].name.rpartition(".")[0]),
        evidence=(Evidence("comparison", "measured", f"{count(len(rows), 'parameter')} on one side only",
                           {"parameters": [row.name for row in rows]}),),
        remedy="look for a branch that depends on the batch: the parameter is reached on one side only", proven=True,
    )  # fmt: skip
