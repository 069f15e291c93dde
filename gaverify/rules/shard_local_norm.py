"""GAV706 shard-local-norm: each rank scales its shard of the gradient by the norm of that shard alone.

What it finds

Clipping or normalising by hand under FSDP2 with the norm of the local shards (`p.grad.to_local()`, `p._local_tensor`),
not of the whole gradient: every rank then divides by another number.

Why gradients diverge

    used_r = g_r · min(1, c / ‖g_r‖),     full: g_r · min(1, c / ‖g‖)

with ‖g‖² = Σ_r ‖g_r‖².

Shards are always shorter than the whole, so the gradient is clipped too little, and its direction changes.

Signature in the numbers

- One factor per shard (1.50 and 1.34, measured), each with a residual at rounding.
- The factor of each shard is the whole norm over the shard's own.
- The sums before the step agree with the full batch's.

Example

A training loop:

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            shards = [p.grad.to_local() for p in model.parameters()]
            norm = torch.stack([s.norm() for s in shards]).norm()
            for shard in shards:
                shard.mul_((max_norm / norm).clamp(max=1))
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Where the norm is only logged; and where no gradient is ever long enough to be clipped.

References

- PyTorch, fully_shard,
  https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.wording import shares

RULE = Rule("GAV706", "shard-local-norm")
_SAME = 1e-3  # factors of several shards that differ by less are one factor for all


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where each shard has a factor of its own."""
    ranks = facts.ranks
    if ranks is None or not ranks.at_fault or len(ranks.shards) < 2:
        return
    factors = [shard.factor for shard in ranks.shards]
    if any(shard.residual > ranks.rounding for shard in ranks.shards):
        return
    if max(factors) - min(factors) <= _SAME * max(map(abs, factors)):
        return
    left = max(abs(shard.norms / shard.factor - 1) if shard.factor else math.inf for shard in ranks.shards)
    evidence = [
        measured(
            "ranks",
            f"the shards of the {ranks.ranks} ranks are {shares(factors)} times the full batch's, each with "
            f"{max(shard.residual for shard in ranks.shards):.0e} left over",
            factors=factors,
        )
    ]
    proven = left <= ranks.rounding
    if proven:
        norms = [shard.norms for shard in ranks.shards]
        text = f"the whole norm over that of each shard is {shares(norms)}, the same to {left:.0e}: proven"
        evidence.append(controlled("ranks", text, norms=norms, left=left))
    yield RULE.finding(
        f"each of the {ranks.ranks} ranks scales its shard of the gradient by a number of its own",
        *evidence,
        remedy="clip with `torch.nn.utils.clip_grad_norm_`, which knows sharded gradients, or add up the squared norms "
        "of all ranks first",
        proven=proven,
    )
