"""GAV704 wrong-rank-scale: the ranks' reduced gradient is the full batch's times one constant.

What it finds

One factor c for all parameters, R or 1/R most of the time: a loss that is divided by the tokens of all ranks although
the engine divides by R as well, a sum over ranks made by hand on top of the engine's mean, or the loss of the whole
batch computed on every rank.

Why gradients diverge

DDP and FSDP2 reduce to the mean (1/R) Σ_r g_r. A loss that already counts each sample with its share of the whole needs
the sum:

    g_r = Σ_i∈r ∂l_i / N     ⇒     Σ_r g_r = full,     (1/R) Σ_r g_r = full / R

Signature in the numbers

The reduced gradient is c times the full batch's, with a residual at rounding (2e-7), and the factor is R or 1/R.

Example

A model:

    import torch
    import torch.distributed as dist
    from torch import nn

    model = nn.Linear(6, 3)
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    steps, options = 1, {"ranks": 2}

    def loss(model, batch):
        inputs, classes = batch
        count = torch.tensor(len(classes))
        dist.all_reduce(count)
        logits = model(inputs)
        losses = nn.functional.cross_entropy(logits, classes, reduction="sum")
        return losses / count

A training loop:

    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) * dist.get_world_size() / K
        loss.backward()  # the engine averages: no sum is needed
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

A model:

    import torch
    import torch.distributed as dist
    from torch import nn

    model = nn.Linear(6, 3)
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    steps, options = 1, {"ranks": 2}

    def loss(model, batch):
        inputs, classes = batch
        count = torch.tensor(len(classes))
        dist.all_reduce(count)
        logits = model(inputs)
        losses = nn.functional.cross_entropy(logits, classes, reduction="sum")
        return losses / count * dist.get_world_size()

A training loop:

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Adam divides a constant factor out again, but for ε; clipping by norm, weight decay inside the gradient and SGD do not,
and a run with another number of ranks then trains with another step size.

References

- PyTorch, DistributedDataParallel, the note on averaging,
  https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
- huggingface/transformers PR#34283, https://github.com/huggingface/transformers/pull/34283
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import beside_one_process, tried

RULE = Rule("GAV704", "wrong-rank-scale")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where one factor for all parameters makes the ranks' gradient the full batch's."""
    ranks = facts.ranks
    if ranks is None or not ranks.at_fault or ranks.apart > ranks.rounding:
        return
    factor, left = ranks.one_factor
    if not math.isfinite(factor) or abs(factor) < ranks.rounding or left > ranks.rounding:
        return
    if abs(factor - 1) <= ranks.rounding:
        return
    if facts.loop is not None and not _of_ranks(factor, ranks.ranks, facts.steps):
        return
    known = (
        (float(ranks.ranks), "R: a sum where the mean over the ranks was meant"),
        (1.0 / ranks.ranks, "1/R: the engine's mean divides once more"),
    )
    meaning = next((f" = {text}" for value, text in known if math.isclose(factor, value, rel_tol=1e-4)), "")
    yield RULE.finding(
        f"the gradient that {ranks.ranks} ranks end up with is {factor:.6g} times the full batch's{meaning}",
        measured("rank-weights", f"{beside_one_process(ranks)}; one factor leaves {left:.0e} over", factor=factor),
        *tried(ranks, f"each rank's loss multiplied by {1 / factor:.6g}"),
        remedy=f"multiply each rank's loss by {1 / factor:.6g}"
        + (": tested, equivalent" if ranks.is_rounding(ranks.weights_control) else ""),
        proven=ranks.is_rounding(ranks.weights_control),
    )


def _of_ranks(factor: float, ranks: int, steps: int) -> bool:
    """Whether a factor is one of ranks: in a loop a division by K can be forgotten as well, which is another rule's."""
    forgotten = any(math.isclose(factor, other, rel_tol=1e-4) for other in (steps, 1.0 / steps) if steps > 1)
    return not forgotten and any(math.isclose(factor, other, rel_tol=1e-4) for other in (ranks, 1.0 / ranks))
