"""GAV604 trailing-window-lost: backward passes after the last step never reach an update.

What it finds

Micro-batches at the end of an epoch, or of the script, whose gradients no optimizer uses, because K does not divide
their number.

Why gradients diverge

The work of those backward passes is lost and their samples are not learned from; when they are always the same ones,
the model never sees them.

Signature in the numbers

Backward passes after the last step, then `zero_grad` or the end of the script; every complete window agrees.

Example

    for epoch in range(epochs):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

Use instead

    for epoch in range(epochs):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            window = min(K, len(loader) - i // K * K)
            (criterion(model(x), y) / window).backward()
            if (i + 1) % K == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()

When it is harmless

With shuffled data and many windows in an epoch: it is then `drop_last` for windows.

References

ultralytics/ultralytics PR#11217
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.lost_passes import cut_off
from gaverify.rules.rule import Rule
from gaverify.rules.wording import counted, passes, place

RULE = Rule("GAV604", "trailing-window-lost")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where the last backward passes of an epoch or of the script are thrown away."""
    loop = facts.loop
    if loop is None:
        return
    tails = cut_off(loop)
    if not tails:
        return
    first = tails[0]
    after = f"after update {first.window - 1}" if first.window > 1 else "before the first update"
    how = "are cleared before a step uses them" if first.by is not None else "are never used: the script ends"
    place_of = first.by if first.by is not None and first.by.file is not None else first.backwards[-1]
    yield RULE.finding(
        f"{passes(len(first.backwards))} {after} {how}",
        counted(loop.windows[:8]),
        location=place(place_of),
        remedy="step after the last micro-batch of an epoch too, and divide by the micro-batches that its window has",
        proven=True,
    )
