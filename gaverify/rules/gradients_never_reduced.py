"""GAV702 gradients-never-reduced: sharded parameters step without any gradient, because no backward pass reduces.

What it finds

FSDP2 keeps the gradients of micro-batches unsharded while `set_requires_gradient_sync(False)` holds, and hands them to
the parameters when a backward pass reduces. Where none of the window does, every `.grad` is None at the step: the
optimizer changes nothing, and no error is raised. Where an early one does and the last does not (the switch is set for
the first micro-batch, say), the step lacks what came after it, and the next window gets that. Under HSDP, a mesh of
replicas of shards, `set_requires_all_reduce(False)` keeps everything back in the same way.

Why gradients diverge

    used = nothing,     full = (1/R) Σ_r Σ_k g_rk

The unsharded sums stay beside the parameters, where no optimizer looks.

Signature in the numbers

- Every sharded parameter has no gradient at the step, although backward passes ran.
- No backward pass of the window reduces (no reduce-scatter), or the last one does not.
- With the reduction switched on the gradient is the full batch's to rounding.

Example

A training loop:

    model.set_requires_gradient_sync(False)
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (x, y) in enumerate(loader):
        last = (i + 1) % K == 0
        model.set_requires_gradient_sync(last)
        (criterion(model(x), y) / K).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Never: the step is lost, or what it lacks comes a step late.

References

- PyTorch, fully_shard,
  https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.records.ranks import RankFacts
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.wording import backward_place, passes

RULE = Rule("GAV702", "gradients-never-reduced")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where sharded parameters step without a gradient, or without that of the last backward pass."""
    ranks = facts.ranks
    left = math.nan if ranks is None else ranks.sync_control
    if ranks is None or not _is_lost(ranks):
        return
    proven = ranks.is_rounding(left)
    missing = "any gradient: the sharded gradients are never reduced"
    seen = f"no sharded parameter has a gradient at the step, and {_reducing(ranks)}"
    if not ranks.stepped_without:
        missing = "the gradient of the window's last backward pass"
        seen = f"{_reducing(ranks)}, and the last one does not"
    evidence = [measured("ranks", seen, backwards=len(ranks.reduced), reductions=ranks.reductions)]
    if left == left:  # not NaN: the control ran
        told = "proven" if proven else "another cause is left"
        text = f"with every backward pass reducing the difference from the full batch is {left:.0e}: {told}"
        evidence.append(controlled("ranks", text, left=left))
    yield RULE.finding(
        f"the {ranks.ranks} ranks step without {missing}",
        *evidence,
        location=backward_place(facts),
        remedy="`set_requires_gradient_sync(True)` before the window's last backward pass"
        + (", and `set_requires_all_reduce(True)`" if ranks.stepped_without and ranks.reductions else "")
        + (": tested, equivalent" if proven else ""),
        proven=proven,
    )


def _is_lost(ranks: RankFacts) -> bool:
    """Whether gradients stay beside their parameters; where some were reduced the control has to have brought them."""
    if ranks.stepped_without:
        return not ranks.reductions or ranks.is_rounding(ranks.sync_control)
    return ranks.at_fault and ranks.ends_unreduced


def _reducing(ranks: RankFacts) -> str:
    """How many backward passes of the window reduce, in words."""
    reducing = f"{ranks.reductions or 'none'} of the window's {passes(len(ranks.reduced))}"
    return f"{reducing} {'reduce' if ranks.reductions > 1 else 'reduces'} over ranks"
