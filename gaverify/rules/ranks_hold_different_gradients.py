"""GAV701 ranks-hold-different-gradients: the ranks step with different gradients, because nothing reduces them.

What it finds

Replicas that train alone: the model's own forward was called in place of the wrapper's, the wrapper was left out, every
backward pass of the window ran under `no_sync`, or the reduction never took place for another reason. Likewise
replicas whose reduced gradients one rank changes alone (`if rank == 0: clip_grad_norm_(…)`), and replicas that begin
with different weights because nothing sent them rank 0's. Of sharded models it holds what several ranks have alike: the
copies of a shard under HSDP, weights that tensor parallelism leaves whole, and those that `fully_shard` was told to
ignore, which nothing reduces.

Why gradients diverge

DDP reduces when a backward pass ends that began with the wrapper's forward, outside `no_sync`. Without it each rank
steps with the gradient of its own samples,

    used_r = g_r,     full = (1/R) Σ_r g_r

and the replicas drift apart; a checkpoint holds what rank 0 has learned from its share of the data.

Signature in the numbers

- Two ranks hold different gradients at the same step (1.4 apart, measured); in right loops they are the same bits.
- Rank 0's gradient is its own one: the weights that it used of the ranks' gradients are 1, 0, …
- Or the gradients are the same bits after the last backward pass, and apart at the step; or the weights are apart
  before the first step.

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
from gaverify.records.ranks import Engine, RankFacts
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.wording import backward_place

RULE = Rule("GAV701", "ranks-hold-different-gradients")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where two ranks step with different gradients, or compute them at different weights."""
    ranks = facts.ranks
    if ranks is None or math.isnan(ranks.apart):
        return
    if ranks.started_apart > ranks.rounding:
        yield _other_weights(ranks)
    elif ranks.apart > ranks.rounding:
        yield _other_gradients(facts, ranks)


def _other_weights(ranks: RankFacts) -> Finding:
    far = ranks.started_apart
    return RULE.finding(
        f"the {ranks.ranks} ranks compute their gradients at different weights",
        measured("ranks", f"the weights of the ranks are {far:.2g} apart (relative) before the first step", apart=far),
        remedy="give every rank rank 0's weights before the first step: DistributedDataParallel does, and so does "
        "`torch.distributed.broadcast` of each parameter",
        proven=False,
    )


def _other_gradients(facts: Facts, ranks: RankFacts) -> Finding:
    after = ranks.summed_apart <= ranks.rounding
    what = "; after the window's last backward pass they were the same" if after else ""
    evidence = [
        measured(
            "ranks",
            f"the gradients of the ranks are {ranks.apart:.2g} apart (relative) at the same step{what}",
            apart=ranks.apart,
        )
    ]
    left, proven = ranks.mean_left, ranks.is_rounding(ranks.mean_left)
    if proven:
        text = f"the mean of the ranks' own gradients is the full batch's to {left:.0e}: proven"
        evidence.append(controlled("rank-weights", text, left=left))
    reduced = ranks.sync_control
    repaired = ranks.is_rounding(reduced) and not after
    if repaired:
        text = f"with every backward pass reducing the difference from the full batch is {reduced:.0e}"
        evidence.append(controlled("ranks", text, left=reduced))
    why = "each changes them in its own way before it" if after else "they were not reduced"
    remedy = _remedy(ranks)
    if after:
        remedy = "let every rank do what changes the gradients after they were reduced: clip, scale, add noise"
    return RULE.finding(
        f"the {ranks.ranks} ranks step with different gradients: {why}",
        *evidence,
        location=None if after else backward_place(facts),
        remedy=remedy + (": tested, equivalent" if repaired else ""),
        proven=proven or repaired,
    )


def _remedy(ranks: RankFacts) -> str:
    """What reduces the gradients, by how the ranks hold the model."""
    if ranks.tensor_parallel:
        return "feed ranks that hold parts of the same layers the same rows, so that what each holds whole is alike"
    if ranks.engine is Engine.FSDP2:
        return "average over the ranks what they hold whole beside their shards, or do not let `fully_shard` ignore it"
    return "call the wrapper's forward, and run the window's last backward pass outside `no_sync`"
