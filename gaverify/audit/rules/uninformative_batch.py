"""GAV901 uninformative-batch (note): what was compared could not have shown a fault.

What it finds

Runs that fed the same micro-batches, gradients that are all zero, and padded batches whose micro-batches happen to have
the same number of valid targets.

Why gradients diverge

They do not here; on other data they might.

Signature in the numbers

Equal counts of valid targets although some targets are ignored; K = 1; every gradient zero.

Example

    for i, (tokens, targets) in enumerate(loader):  # every row has the same number of targets
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (tokens, targets) in enumerate(loader):  # rows of different length
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Where all of the training data is like this batch.

References

huggingface/transformers PR#34191
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record
from gaverify.results import Evidence, Finding, Outcome

CODE, NAME = "GAV901", "uninformative-batch"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a note for each reason why an equivalent first update says little."""
    update = record.updates[0] if record.updates else None
    if update is None or update.outcome is Outcome.DIVERGENT:
        return
    reasons = []
    if record.same_pieces:
        reasons.append("both runs fed the first update in the same pieces: the full batch was compared with itself")
    if update.parameters and all(row.reference_norm == row.accumulated_norm == 0 for row in update.parameters):
        reasons.append("every gradient is zero")
    counts = update.valid_targets
    if len(counts) > 1 and len(set(counts)) == 1 and update.ignored_targets:
        reasons.append(
            f"every micro-batch has {counts[0]} valid targets: averaging them equally is right on this batch only"
        )
    if reasons:
        yield Finding(
            CODE, NAME, "note", "; ".join(reasons),
            evidence=(Evidence("batch-quality", "measured", "; ".join(reasons), {"valid_targets": list(counts)}),),
            remedy="audit on data whose samples differ, with different numbers of valid targets", proven=True,
        )  # fmt: skip
