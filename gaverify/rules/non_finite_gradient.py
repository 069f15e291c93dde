"""GAV503 non-finite-gradient (fault or note): a gradient is NaN or infinite on either side.

What it finds

Gradients that are not finite, in the full batch, in the accumulated run, or in both, and that no empty micro-batch
explains (that is GAV203): divisions by zero, logarithms and square roots at zero, overflow in float16.

In a training loop: gradients at the optimizer's step that are not finite.

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
- In a training loop: NaN or infinity on one side only is a fault of the accumulation; on both sides nothing can be
  compared.

Example

A model:

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

A training loop:

    for i, (x, y) in enumerate(loader):
        mask = y != -100
        loss = losses(model(x), y)[mask].mean()  # NaN where no target is valid
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

An ε inside the root, the logarithm or the divisor, or `torch.linalg.vector_norm`, whose derivative at zero is zero.
`torch.autograd.set_detect_anomaly(True)` points to the operation whose backward gave the first NaN.

A model:

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

A training loop:

    for window in windows(loader, K):
        total = sum((y != -100).sum() for _, y in window)
        for x, y in window:
            loss = losses(model(x), y)[y != -100].sum() / total
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

When it is harmless

Under `GradScaler` the first steps overflow on purpose and are skipped. Verify without loss scaling; a gradient that
is not finite without it is never harmless.

In a training loop: where a `GradScaler` skips the step; such updates are not compared.

References

- PyTorch, Anomaly detection, https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
- PyTorch, Automatic Mixed Precision examples, https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.comparison import NotCompared, ParameterComparison
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding, Location
from gaverify.rules.empty_micro_batch import empty_micro_batches
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import count

RULE = Rule("GAV503", "non-finite-gradient")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a fault where one run's gradients alone are not finite, a note where both are.

    Nothing where an empty micro-batch is to blame.
    """
    if empty_micro_batches(facts) and facts.compared.divergent:
        return
    for update, compared in facts.comparisons:
        rows = [row for row in compared if row.why is not None and row.why.not_finite]
        if rows:
            yield _finding(rows, update)
            return


def _finding(rows: list[ParameterComparison], update: int | None) -> Finding:
    one_sided = [row for row in rows if row.why is not NotCompared.NOT_FINITE_IN_BOTH]
    shown = one_sided or rows
    where = f"`{shown[0].name}`" + (f" and {count(len(shown) - 1, 'more parameter')}" if len(shown) > 1 else "")
    return RULE.finding(
        f"the gradient of {where} is {shown[0].reason}" + (f" (update {update})" if update is not None else ""),
        measured("comparison", f"{count(len(rows), 'gradient')} not finite", parameters=[row.name for row in rows]),
        severity="fault" if one_sided else "note",
        location=Location(shown[0].name.rpartition(".")[0]),
        remedy="look for divisions by zero, logarithms of zero, means over nothing, and overflow in low precision",
        proven=True,
    )
