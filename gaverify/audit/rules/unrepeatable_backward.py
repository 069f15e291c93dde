"""GAV303 unrepeatable-backward (note): the full-batch run differs from itself.

What it finds

A script whose two full-batch runs, with weights that differ by one unit roundoff, do not train on the same thing: other
first weights, or gradients that differ by far more than rounding.

Why gradients diverge

Nothing can be compared where two equal runs differ: a generator without a seed, data read in another order, a kernel
that is not deterministic.

Signature in the numbers

The noise floor is as large as the gradient.

Example

    model = build()  # no seed
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    torch.manual_seed(0)
    model = build()
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

For training, where the seed is not to matter; for the audit give the script one.

References

https://pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV303", "unrepeatable-backward"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a note (nothing is proven about accumulation) where equal runs differ."""
    update = next((update for update in record.updates if update.unrepeatable), None)
    if update is None:
        return
    yield Finding(
        CODE, NAME, "note", f"the full-batch run does not repeat itself: {update.unrepeatable}",
        evidence=(Evidence("noise-floor", "measured", f"in update {update.number}: {update.unrepeatable}",
                           {"update": update.number}),),
        remedy="seed every generator at the start of the script (torch, NumPy, random, workers), or pass it a seed",
        proven=True,
    )  # fmt: skip
