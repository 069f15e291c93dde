"""GAV203 empty-micro-batch: a micro-batch without a valid target gives NaN, or drops out of the mean.

What it finds

A micro-batch whose targets are all ignored (padding, prompts that are masked, images without objects), so that the
mean of its loss is 0/0. The full batch has valid targets and notices nothing.

In a training loop: a micro-batch of the window whose targets are all ignored, where the full batch has valid ones.

Why gradients diverge

A mean over n_k = 0 targets is 0/0. What comes out depends on who computes it:

- `cross_entropy` with `reduction="mean"` returns NaN since PyTorch 1.11, and a gradient of zero: the micro-batch
  adds nothing, while the others are still multiplied by 1/K. The gradient is too small by K' / K, K' of K being
  non-empty.
- A hand-written `total / count` has a NaN gradient, and one such micro-batch ruins the whole window.
- `count.clamp(min=1)` avoids the NaN, and takes the share 1/K of the mean all the same.

Signature in the numbers

- The valid targets per micro-batch contain a zero: 8, 0, 8, 8 in the example, and a relative difference of exactly
  1/4 in every parameter.
- The logged loss is NaN while training goes on, or the gradient is NaN on the accumulated side only.
- In a training loop: The valid targets of the micro-batches contain a zero; the gradient is the full batch's times
  the share of non-empty micro-batches where those have equally many.

Example

A model:

    import torch
    from torch import nn

    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    tokens = torch.randint(11, (8, 6))
    labels = tokens.roll(-1, dims=1)
    for row, length in enumerate((6, 2, 0, 0, 5, 3, 2, 6)):
        labels[row, length:] = -100  # the second micro-batch has none
    batch = tokens, labels

    def loss(model, batch):
        tokens, labels = batch
        logits = model(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten())

A training loop:

    for i, (tokens, targets) in enumerate(loader):  # one is padding only
        logits = model(tokens).flatten(0, 1)
        loss = cross_entropy(logits, targets.flatten(), ignore_index=-100)
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

A sum over the micro-batch, divided by the valid targets of the whole window. A sum over nothing is 0, and the
window's count is zero only if there is nothing to learn from at all.

A model:

    import torch
    from torch import nn

    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    tokens = torch.randint(11, (8, 6))
    labels = tokens.roll(-1, dims=1)
    for row, length in enumerate((6, 2, 0, 0, 5, 3, 2, 6)):
        labels[row, length:] = -100
    batch = tokens, labels, (labels != -100).sum()  # the window's count
    options = {"weighting": "none"}

    def loss(model, batch):
        tokens, labels, valid = batch
        logits = model(tokens).flatten(0, 1)
        summed = nn.functional.cross_entropy(
            logits, labels.flatten(), reduction="sum"
        )
        return summed / valid

A training loop:

    for window in windows(loader, K):
        total = sum((targets != -100).sum() for _, targets in window)
        for tokens, targets in window:
            logits = model(tokens).flatten(0, 1)
            loss = cross_entropy(
                logits, targets.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / total).backward()
        optimizer.step()
        optimizer.zero_grad()

When it is harmless

Never where the gradient is NaN. Where the empty micro-batch only drops out, the step of that window is too short by
its share, which a rare empty micro-batch hardly shows in training, but it does bias against data with few targets.

In a training loop: where such micro-batches are rare and their gradient is zero rather than NaN: that one step is too
short.

References

- pytorch/pytorch#70348 (NaN where all labels are ignored), https://github.com/pytorch/pytorch/issues/70348
- pytorch/pytorch#116349, https://github.com/pytorch/pytorch/issues/116349
- Hugging Face, Fixing Gradient Accumulation, 2024, https://huggingface.co/blog/gradient_accumulation
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.records.weights import is_constant
from gaverify.rules.rule import Rule, measured
from gaverify.rules.scale import constant
from gaverify.rules.wording import backward_place, largest

RULE = Rule("GAV203", "empty-micro-batch")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a micro-batch without valid targets gives NaN or drops out of the mean."""
    empty = empty_micro_batches(facts)
    if not empty or not facts.compared.divergent:
        return
    which = ", ".join(str(k + 1) for k in empty)
    window = f"of {facts.steps}" if facts.loop is None else f"of update {facts.compared.update}"
    losses, counts = facts.weights.losses, facts.weights.valid_targets
    lost = [k for k in empty if k < len(losses) and not math.isfinite(losses[k])]
    effect = "its mean loss is 0/0" if lost else "it takes a share of the mean and adds nothing"
    rows = [row for row in facts.compared.rows if row.why is not None and row.why.not_finite]
    shown = f"gradients {rows[0].reason}: `{rows[0].name}`" if rows else largest(facts)
    yield RULE.finding(
        f"micro-batch {which} {window} has no valid target: {effect}",
        measured(
            "micro-batch-weights",
            f"{shown}; valid targets per micro-batch: {', '.join(f'{n:g}' for n in counts)}",
            valid_targets=list(counts),
        ),
        location=backward_place(facts),
        remedy="divide the summed loss by the valid targets of the whole window, which is never zero",
        proven=True,
    )


def empty_micro_batches(facts: Facts) -> list[int]:
    """Returns the positions of micro-batches whose loss counted no target, where others counted some."""
    counts = facts.weights.valid_targets
    return [k for k, found in enumerate(counts) if not found > 0] if any(found > 0 for found in counts) else []


def explains_weights(facts: Facts) -> bool:
    """Whether empty micro-batches are all that is wrong with the weights: the others have equal ones."""
    empty, fit, loop = empty_micro_batches(facts), facts.weights.fit, facts.loop
    if not empty or fit is None:
        return False
    if loop is None:
        return is_constant([c for k, c in enumerate(fit.weights) if k not in empty], fit.residual)
    counts = facts.weights.valid_targets
    if len(fit.multipliers) != len(counts) or fit.residual > loop.tolerance:
        return False
    filled = tuple(factor for at, factor in enumerate(fit.multipliers) if at not in empty)
    return constant((*filled, len(counts) / len(filled)), loop.tolerance)
