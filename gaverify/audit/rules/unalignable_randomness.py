"""GAV302 unalignable-randomness (note): a random draw could not be dealt out per sample.

What it finds

Draws inside the forward whose shape or number depends on the batch in another way than row by row: a permutation of the
batch, draws per expert, a draw more or less than in the full batch.

Why gradients diverge

The micro-batches see other random numbers than the full batch; no comparison can tell that from a fault.

Signature in the numbers

A difference that changes with the seed, while the draws named here were not aligned.

Example

    for i, (x, y) in enumerate(loader):
        partner = torch.randperm(len(x))  # mixes samples that share a micro-batch
        (criterion(model(x), model(x)[partner]) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (x, y) in enumerate(loader):
        noise = torch.rand(len(x), 1)  # one value for each row
        (criterion(model(x) + noise, y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Where the draw is only an augmentation: the runs then agree in expectation.

References

pytorch/vision PR#4379, huggingface/sentence-transformers PR#3862
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV302", "unalignable-randomness"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a note: where the runs differ and nothing else explains it, these draws leave the question open."""
    if not record.unaligned:
        return
    text = "; ".join(f"`{name}`: {why}" for name, why in record.unaligned.items())
    yield Finding(
        CODE, NAME, "note",
        "random draws could not be dealt out per sample",
        evidence=(Evidence("random-draws", "measured", text, dict(record.unaligned)),),
        remedy="draw per sample (one value for each row of the batch) or once per forward, or switch it off here",
    )  # fmt: skip
