"""GAV707 rank-statistics: a layer normalises over the samples of its rank alone.

What it finds

BatchNorm and its kin under several ranks: each rank computes mean and variance of its own micro-batch, and its buffers
drift away from the other ranks'. `DistributedDataParallel` sends rank 0's buffers to the others before a forward, which
hides the drift and repairs nothing.

Why gradients diverge

    x̂ = (x − mean_r) / std_r,     full: (x − mean) / std

The statistics of B/(R·K) samples are not those of B.

Signature in the numbers

- Buffers differ between the ranks when the window ends.
- With these layers in evaluation mode in both runs the difference is rounding.

Example

A training loop:

    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = DistributedDataParallel(net)
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    net = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3))
    model = DistributedDataParallel(net)
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Where the batch of a rank is large enough that its statistics are the data's. `SyncBatchNorm` takes the statistics of
all ranks (on GPUs), but still per micro-batch: with K = 1 it is the full batch's.

References

- PyTorch, SyncBatchNorm, https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding, Location
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.wording import listed

RULE = Rule("GAV707", "rank-statistics")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where buffers of the ranks are apart and holding their layers still repairs the gradient."""
    ranks = facts.ranks
    if ranks is None or facts.loop is None or not ranks.at_fault or not ranks.buffers_apart:
        return
    left, proven = ranks.frozen_control, ranks.is_rounding(ranks.frozen_control)
    if not left < ranks.difference:
        return
    names = [name.partition(":")[2] for name in ranks.buffers_apart]
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    told = "proven" if proven else "another cause is left"
    yield RULE.finding(
        f"{listed([f'`{owner}`' for owner in owners])} computes statistics over the samples of its own rank",
        measured(
            "ranks", f"buffers differ between the ranks: {listed([f'`{name}`' for name in names])}", buffers=names
        ),
        controlled("ranks", f"in evaluation mode in both runs the difference is {left:.0e}: {told}", left=left),
        location=Location(owners[0]),
        remedy="GroupNorm or LayerNorm, evaluation mode for these layers, or SyncBatchNorm where K = 1",
        proven=proven,
    )
