"""GAV702 gradients-never-reduced: sharded parameters step without any gradient, because no backward pass reduces.

What it finds

FSDP2 keeps the gradients of micro-batches unsharded while `set_requires_gradient_sync(False)` holds, and hands them to
the parameters when a backward pass reduces. Where none of the window does, every `.grad` is None at the step: the
optimizer changes nothing, and no error is raised.

Why gradients diverge

    used = nothing,     full = (1/R) Σ_r Σ_k g_rk

The unsharded sums stay beside the parameters, where no optimizer looks.

Signature in the numbers

- Every sharded parameter has no gradient at the step, although backward passes ran.
- No backward pass of the window reduces (no reduce-scatter).
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

Never: the step is lost.

References

- PyTorch, fully_shard,
  https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.wording import backward_place

RULE = Rule("GAV702", "gradients-never-reduced")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where sharded parameters step without a gradient."""
    ranks = facts.ranks
    if ranks is None or not ranks.stepped_without or ranks.reductions:
        return
    evidence = [
        measured(
            "ranks",
            f"no sharded parameter has a gradient at the step, and none of the window's {len(ranks.reduced)} backward "
            "passes reduces over the ranks",
            backwards=len(ranks.reduced),
        )
    ]
    left, proven = ranks.sync_control, ranks.is_rounding(ranks.sync_control)
    if left == left:  # not NaN: the control ran
        told = "proven" if proven else "another cause is left"
        text = f"with every backward pass reducing the difference from the full batch is {left:.0e}: {told}"
        evidence.append(controlled("ranks", text, left=left))
    yield RULE.finding(
        f"the {ranks.ranks} ranks step without any gradient: the sharded gradients are never reduced",
        *evidence,
        location=backward_place(facts),
        remedy="`set_requires_gradient_sync(True)` before the window's last backward pass"
        + (": tested, equivalent" if proven else ""),
        proven=proven,
    )
