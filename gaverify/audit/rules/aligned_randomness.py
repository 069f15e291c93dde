"""GAV301 aligned-randomness (note): random draws of the full batch were dealt to the micro-batches.

What it finds

Dropout, drop-path or noise inside the forward whose draws were recorded in the full-batch run and handed to the
accumulated run sample by sample.

Why gradients diverge

They would: a mask for a batch of 8 is not the masks for 4 × 2. With the same draws per sample they do not.

Signature in the numbers

The runs agree to rounding with the dealt draws; outside gaverify they agree in expectation.

Example

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()  # the model has dropout
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()  # nothing to repair
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Always: it is a note on what was compared.

References

N. Srivastava et al., Dropout: a simple way to prevent neural networks from overfitting, 2014
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV301", "aligned-randomness"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a note where draws were dealt out."""
    if not record.dealt:
        return
    draws = f"{record.dealt} random draw{'s' if record.dealt > 1 else ''}"
    were = "were" if record.dealt > 1 else "was"
    yield Finding(
        CODE, NAME, "note", f"{draws} inside the full batch's forwards {were} dealt out per sample",
        evidence=(Evidence("random-draws", "measured",
                           "outside gaverify the runs agree in expectation, not draw by draw",
                           {"dealt": record.dealt}),),
        proven=True,
    )  # fmt: skip
