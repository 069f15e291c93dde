"""GAV503 non-finite-gradient (fault or note): a gradient is NaN or infinite on either side.

What it finds

Gradients that are not finite, in the full batch, in the accumulated run, or in both, and that no empty micro-batch
explains (that is GAV203): divisions by zero, logarithms and square roots at zero, overflow in float16.

Why gradients diverge

NaN spreads: one sample with a NaN gradient makes the sum over its batch NaN, in every parameter on its way. On one
side only, the usual reason is size: a sum over B samples overflows float16 at 65504 where a sum over B/K does not,
or a deviation over a micro-batch of equal values is zero where that of the full batch is not. On both sides the
gradient is broken in itself, and nothing can be compared.

The derivative is what counts: sqrt(x) is finite at 0 and its derivative 1 / (2 sqrt(x)) is not; `torch.where` does
not help, since 0 · inf in the branch not taken is NaN.

Signature in the numbers

- The table names the parameters and the side.
- On one side only the runs differ: a fault. In both runs nothing was compared: a note, and an inconclusive verdict
  unless another parameter decides it.
- The loss itself may be finite, as in the example.

Example

    import torch
    from torch import nn

    model = nn.Linear(6, 3, bias=False)
    inputs, targets = torch.randn(16, 6), torch.randn(16, 3)
    inputs[5], targets[5] = 0.0, 0.0  # an empty sample: distance 0
    batch = inputs, targets

    def loss(model, batch):
        inputs, targets = batch
        squared = (model(inputs) - targets).square().sum(1)
        return squared.sqrt().mean()

Use instead

An ε inside the root, the logarithm or the divisor, or `torch.linalg.vector_norm`, whose derivative at zero is zero.
`torch.autograd.set_detect_anomaly(True)` points to the operation whose backward gave the first NaN.

    import torch
    from torch import nn

    model = nn.Linear(6, 3, bias=False)
    inputs, targets = torch.randn(16, 6), torch.randn(16, 3)
    inputs[5], targets[5] = 0.0, 0.0
    batch = inputs, targets

    def loss(model, batch):
        inputs, targets = batch
        squared = (model(inputs) - targets).square().sum(1)
        return (squared + 1e-12).sqrt().mean()

When it is harmless

Under `GradScaler` the first steps overflow on purpose and are skipped. Verify without loss scaling; a gradient that
is not finite without it is never harmless.

References

- PyTorch, Anomaly detection, https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
- PyTorch, Automatic Mixed Precision examples, https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.diagnosis.empty_micro_batch import empty_micro_batches
from gaverify.diagnosis.wording import count
from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding, Location, Outcome

CODE, NAME = "GAV503", "non-finite-gradient"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where a gradient is NaN or infinite on either side, and no empty micro-batch is to blame."""
    rows = [row for row in measured.rows if math.isnan(row.difference_norm) and row.reason.startswith("not finite")]
    if not rows or (empty_micro_batches(measured) and measured.divergent):
        return
    divergent = any(row.outcome is Outcome.DIVERGENT for row in rows)
    where = f"`{rows[0].name}`" + (f" and {len(rows) - 1} more parameters" if len(rows) > 1 else "")
    yield Finding(
        CODE, NAME, "fault" if divergent else "note", f"the gradient of {where} is {rows[0].reason}",
        location=Location(rows[0].name.rpartition(".")[0]),
        evidence=(Evidence("comparison", "measured", f"{count(len(rows), 'gradient')} not finite",
                           {"parameters": [row.name for row in rows]}),),
        remedy="look for divisions by zero, logarithms of zero, and overflow in low precision", proven=True,
    )  # fmt: skip
