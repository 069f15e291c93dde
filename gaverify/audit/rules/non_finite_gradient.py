"""GAV503 non-finite-gradient (fault or note): NaN or infinity in the gradient of one run or of both.

What it finds

Gradients at the optimizer's step that are not finite.

Why gradients diverge

NaN survives every sum: one micro-batch without valid targets, or one overflow, spoils the whole window.

Signature in the numbers

NaN or infinity on one side only is a fault of the accumulation; on both sides nothing can be compared.

Example

    for i, (x, y) in enumerate(loader):
        mask = y != -100
        loss = losses(model(x), y)[mask].mean()  # NaN where a micro-batch has no valid target
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for window in windows(loader, K):
        total = sum((y != -100).sum() for _, y in window)
        for x, y in window:
            loss = losses(model(x), y)[y != -100].sum() / total
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

When it is harmless

Where a `GradScaler` skips the step; such updates are not compared.

References

https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV503", "non-finite-gradient"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a fault where one run's gradients alone are not finite, a note where both are."""
    for update in record.updates:
        rows = [row for row in update.parameters if row.reason.startswith("not finite")]
        if not rows or not update.judged:
            continue
        one_sided = [row for row in rows if not row.reason.endswith("both runs")]
        row = (one_sided or rows)[0]
        more = f" and {len(one_sided or rows) - 1} more" if len(one_sided or rows) > 1 else ""
        yield Finding(
            CODE, NAME, "fault" if one_sided else "note",
            f"the gradient of `{row.name}`{more} is {row.reason} (update {update.number})",
            evidence=(Evidence("comparison", "measured",
                               f"{len(rows)} of {len(update.parameters)} gradients are not finite",
                               {"parameters": [row.name for row in rows]}),),
            remedy="look for a mean over nothing (a micro-batch without valid targets), or an overflow", proven=True,
        )  # fmt: skip
        return
