"""GAV708 synchronised-every-micro-batch (note): all backward passes of a window reduce over the ranks; one would do.

What it finds

Loops under DDP or FSDP2 without `no_sync` or `set_requires_gradient_sync`: the gradients are right, and K times as much
is sent as has to be.

Why gradients diverge

They do not: the mean over the ranks of a sum is the sum of the means,

    Σ_k (1/R) Σ_r g_rk = (1/R) Σ_r Σ_k g_rk

Signature in the numbers

- K reductions in a window of K micro-batches (FSDP2: 12 in place of 3, one for each group of parameters).
- The gradients agree.

Example

A training loop:

    for i, (x, y) in enumerate(loader):
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

Always, but for time. Under FSDP2 it is a choice as well: without a reduction the gradients of the window stay
unsharded, which takes the memory of a whole gradient on every rank.

References

- PyTorch, DistributedDataParallel.no_sync,
  https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.records.ranks import Engine
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import backward_place

RULE = Rule("GAV708", "synchronised-every-micro-batch")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a note where more than one backward pass of the first window reduces over the ranks."""
    ranks = facts.ranks
    if ranks is None or facts.loop is None or ranks.reductions < 2:
        return
    whole, last = sum(ranks.reduced), ranks.reduced[-1]
    switch = "set_requires_gradient_sync(False)" if ranks.engine is Engine.FSDP2 else "no_sync()"
    yield RULE.finding(
        f"{ranks.reductions} of {len(ranks.reduced)} backward passes of a window reduce over the ranks; one would do",
        measured(
            "ranks",
            f"each rank reduces {whole:,} bytes per window; {last:,} with the last backward pass alone",
            bytes=whole,
            needed=last,
            reductions=ranks.reductions,
        ),
        location=backward_place(facts),
        remedy=f"run all backward passes of a window but the last under `{switch}`",
        severity="note",
        proven=True,
    )
