"""GAV203 empty-micro-batch: a micro-batch without a valid target drops out of the mean, or makes it NaN.

What it finds

A micro-batch of the window whose targets are all ignored, where the full batch has valid ones.

Why gradients diverge

Its mean is 0/0: cross entropy gives it a gradient of zero, and the others are divided by K all the same.

Signature in the numbers

The valid targets of the micro-batches contain a zero; the gradient is the full batch's times the share of non-empty
micro-batches where those have equally many.

Example

    for i, (tokens, targets) in enumerate(loader):  # one of them is padding only
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for window in windows(loader, K):
        total = sum((targets != -100).sum() for _, targets in window)
        for tokens, targets in window:
            loss = cross_entropy(
                model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / total).backward()
        optimizer.step()
        optimizer.zero_grad()

When it is harmless

Where such micro-batches are rare and their gradient is zero rather than NaN: that one step is too short.

References

pytorch/pytorch#70348, https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record, UpdateComparison
from gaverify.audit.rules.scale import constant
from gaverify.audit.rules.wording import backward_place, difference
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV203", "empty-micro-batch"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a finding where the first differing update has a micro-batch without valid targets."""
    update = record.divergent
    if update is None or not empty_micro_batches(update):
        return
    which = ", ".join(str(at + 1) for at in empty_micro_batches(update))
    counts = ", ".join(map(str, update.valid_targets))
    yield Finding(
        CODE, NAME, "fault",
        f"micro-batch {which} of update {update.number} has no valid target: "
        "it takes a share of the mean and adds nothing",
        location=backward_place(record.window_of(update.number)),
        evidence=(Evidence("micro-batch-weights", "measured",
                           f"{difference(update)}; valid targets per micro-batch: {counts}",
                           {"valid_targets": list(update.valid_targets)}),),
        remedy="divide the summed loss by the valid targets of the whole window, which is never zero", proven=True,
    )  # fmt: skip


def empty_micro_batches(update: UpdateComparison) -> list[int]:
    """Returns the positions of micro-batches whose loss counted no target, where others counted some."""
    counts = update.valid_targets
    return [at for at, count in enumerate(counts) if count == 0] if any(counts) else []


def explains(record: Record) -> bool:
    """Whether empty micro-batches are all that is wrong with the weights: the others have equal ones, of 1/K' each."""
    update = record.divergent
    if update is None or update.fit is None or not empty_micro_batches(update):
        return False
    empty, fit = empty_micro_batches(update), update.fit
    if len(fit.multipliers) != len(update.valid_targets) or fit.residual > record.tolerance:
        return False
    filled = tuple(factor for at, factor in enumerate(fit.multipliers) if at not in empty)
    return constant((*filled, len(update.valid_targets) / len(filled)), record.tolerance)
