"""GAV000 unexplained (note): the runs differ and no rule names the cause.

What it finds

A difference at the optimizer that is neither a factor, nor other weights of the micro-batches, nor a wrong order of
calls.

Why gradients diverge

Most often samples act on each other inside the model or the loss (batch statistics, in-batch negatives): then no
weights of the micro-batches give the full-batch gradient.

Signature in the numbers

The best weights leave a large residual.

Example

    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    model = nn.Sequential(nn.Linear(16, 32), nn.GroupNorm(4, 32), nn.Linear(32, 1))
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

It is not known to be.

References

pytorch/pytorch#46516
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record, UpdateComparison
from gaverify.audit.rules.wording import difference
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV000", "unexplained"


def judge(record: Record, found: tuple[Finding, ...]) -> Iterator[Finding]:
    """Yields a note where a judged update differs and nothing of severity fault came out."""
    update = record.divergent
    if update is None or record.unaligned or any(finding.severity == "fault" for finding in found):
        return
    ruled_out = ["no call stands in the wrong place"]
    if update.fit is not None:
        ruled_out.insert(0, f"the best weights of the micro-batches leave {update.fit.residual:.1e} over")
    remedy = "samples that act on each other in the model or the loss look like this: "
    remedy += "`gaverify run --model FILE:FACTORY` on the same model names the operation"
    alone = _without_backward(record, update)
    if alone:
        ruled_out.append(f"{alone} of {len(update.sizes)} forwards have no backward pass of their own")
        remedy = "call `backward()` for every micro-batch, or sum their losses before the one call"
    yield Finding(
        CODE, NAME, "note", f"the difference in update {update.number} is real; no rule of the audit explains it",
        evidence=(Evidence("comparison", "measured", difference(update), {"update": update.number}),
                  Evidence("all", "ruled out", "; ".join(ruled_out), {})),
        remedy=remedy,
    )  # fmt: skip


def _without_backward(record: Record, update: UpdateComparison) -> int:
    """How many forwards of the window have no backward pass, where the full batch's run has one for each."""
    whole = next((window for window in record.full_windows if window.number == update.number), None)
    if whole is None or len(whole.of("forward")) != len(whole.of("backward")):
        return 0
    return max(len(update.sizes) - update.backwards, 0)
