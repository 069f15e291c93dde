"""GAV101 batch-statistics: a normalisation layer uses the statistics of the batch that it is given.

What it finds

A module that scales its channels by mean and variance taken over the samples that it sees together: `BatchNorm1d`,
`BatchNorm2d`, `BatchNorm3d`, `SyncBatchNorm`, and norms written by hand. It is found by what it does to the
numbers, not by its class.

Why gradients diverge

A normalisation layer in training mode computes, per channel,

    y_i = γ (x_i − μ) / sqrt(σ² + ε) + β,     μ, σ² over the batch that is here

Accumulation hands it a micro-batch of B/K samples, so that each micro-batch has its own μ_k and σ²_k. The forward
of a sample then depends on who sits beside it, and so does its gradient, which flows through μ and σ² to its
neighbours. The full-batch loss is not a weighted sum of the micro-batch losses any more, and no choice of
micro-batch weights repairs it. One such layer makes every parameter of the network differ, those before it
included.

Signature in the numbers

- The first diverging operation is the normalisation; its inputs agree, its outputs do not, for every sample.
- Relative differences are large, around 1 in the example, and do not shrink in float64.
- The best micro-batch weights leave much of the gradient over.
- With the layer in `eval` mode in both runs the difference falls to rounding: this is the proof that gaverify runs.
- Running statistics end up different as well (GAV402).

Example

A model:

    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    )
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

A training loop:

    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

Use instead

A normalisation that looks at one sample at a time: GroupNorm, LayerNorm, RMSNorm. Where the statistics are trained
already (fine-tuning), freeze them: `.eval()` on the layer after every `model.train()`, or FrozenBatchNorm.
`gaverify.remedies.convert_batch_norm(model, to="group")` and `to="frozen"` do either to a whole model.
SyncBatchNorm is no repair: it shares statistics between devices, not between micro-batches.

A model:

    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

A training loop:

    model = nn.Sequential(
        nn.Linear(16, 32), nn.GroupNorm(4, 32), nn.Linear(32, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

When it is harmless

Training works with the statistics of micro-batches when these are large enough to estimate them (tens of samples
per channel and device): data-parallel training without SyncBatchNorm has always done so, and small statistics
batches act as a regulariser. It is then another training recipe than the full batch, not the same one in less
memory. With micro-batches of a few samples it costs accuracy. In `eval` mode there is nothing to find.

References

- S. Ioffe, C. Szegedy, Batch Normalization, 2015, section 3, https://arxiv.org/abs/1502.03167
- Y. Wu, K. He, Group Normalization, 2018, figure 1 (error against batch size), https://arxiv.org/abs/1803.08494
- PyTorch, BatchNorm1d, https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html
- pytorch/pytorch#46516, https://github.com/pytorch/pytorch/issues/46516
- ultralytics/yolov5#1630, https://github.com/ultralytics/yolov5/issues/1630
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.experiment import ControlKind
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.controls import control, first_operation, proven
from gaverify.rules.rule import Rule
from gaverify.rules.wording import module_name, tested

RULE = Rule("GAV101", "batch-statistics")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding per cause in which a module normalises its channels by statistics of the batch."""
    for cause in facts.forward.causes:
        suspect = cause.suspect
        if not (suspect.statistics and suspect.in_model):
            continue
        operation = suspect.culprit
        remedies = [
            f"{run.what} in its place: {tested(run)}"
            for run in cause.remedies
            if run.rounding and run.kind is ControlKind.REPLACED
        ]
        if cause.control is not None and cause.control.kind is ControlKind.FROZEN:
            remedies.append("freeze its statistics (`.eval()` on the layer, after every `model.train()`)")
        yield RULE.finding(
            f"{module_name(operation.module, operation.kind)} normalises over the micro-batch",
            first_operation(facts, cause),
            control(facts, cause),
            location=operation.location,
            remedy="; or ".join(remedies) or "use statistics of the sample itself, or stored ones",
            proven=proven(facts, cause),
        )
