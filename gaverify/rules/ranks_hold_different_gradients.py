"""GAV701 ranks-hold-different-gradients: the ranks step with different gradients, because nothing reduces them.

What it finds

Replicas that train alone: the model's own forward was called in place of the wrapper's, the wrapper was left out, every
backward pass of the window ran under `no_sync`, or the reduction never took place for another reason.

Why gradients diverge

DDP reduces when a backward pass ends that began with the wrapper's forward, outside `no_sync`. Without it each rank
steps with the gradient of its own samples,

    used_r = g_r,     full = (1/R) Σ_r g_r

and the replicas drift apart; a checkpoint holds what rank 0 has learned from its share of the data.

Signature in the numbers

- Two ranks hold different gradients at the same step (1.4 apart, measured); in right loops they are the same bits.
- Rank 0's gradient is its own one: the weights that it used of the ranks' gradients are 1, 0, …

Example

A training loop:

    for i, (x, y) in enumerate(loader):
        with model.no_sync():
            (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (x, y) in enumerate(loader):
        last = (i + 1) % K == 0
        with contextlib.nullcontext() if last else model.no_sync():
            (criterion(model(x), y) / K).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Where the ranks are meant to train alone and are averaged later (local SGD, federated averaging).

References

- PyTorch, DistributedDataParallel.no_sync,
  https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.wording import backward_place

RULE = Rule("GAV701", "ranks-hold-different-gradients")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where two ranks step with different gradients."""
    ranks = facts.ranks
    if ranks is None or math.isnan(ranks.apart) or ranks.apart <= ranks.rounding:
        return
    evidence = [
        measured(
            "ranks",
            f"the gradients of the ranks are {ranks.apart:.2g} apart (relative) at the same step",
            apart=ranks.apart,
        )
    ]
    left, proven = ranks.mean_left, ranks.is_rounding(ranks.mean_left)
    if proven:
        text = f"the mean of the ranks' own gradients is the full batch's to {left:.0e}: proven"
        evidence.append(controlled("rank-weights", text, left=left))
    reduced = ranks.sync_control
    repaired = ranks.is_rounding(reduced)
    if repaired:
        text = f"with every backward pass reducing the difference from the full batch is {reduced:.0e}"
        evidence.append(controlled("ranks", text, left=reduced))
    yield RULE.finding(
        f"the {ranks.ranks} ranks step with different gradients: they were not reduced",
        *evidence,
        location=backward_place(facts),
        remedy="call the wrapper's forward, and run the window's last backward pass outside `no_sync`"
        + (": tested, equivalent" if repaired else ""),
        proven=proven or repaired,
    )
