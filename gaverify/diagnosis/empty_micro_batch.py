"""GAV203 empty-micro-batch: a micro-batch without a valid target gives NaN, or drops out of the mean.

What it finds

A micro-batch whose targets are all ignored (padding, prompts that are masked, images without objects), so that the
mean of its loss is 0/0. The full batch has valid targets and notices nothing.

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

Example

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

Use instead

A sum over the micro-batch, divided by the valid targets of the whole window. A sum over nothing is 0, and the
window's count is zero only if there is nothing to learn from at all.

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

When it is harmless

Never where the gradient is NaN. Where the empty micro-batch only drops out, the step of that window is too short by
its share, which a rare empty micro-batch hardly shows in training, but it does bias against data with few targets.

References

- pytorch/pytorch#70348 (NaN where all labels are ignored), https://github.com/pytorch/pytorch/issues/70348
- pytorch/pytorch#116349, https://github.com/pytorch/pytorch/issues/116349
- Hugging Face, Fixing Gradient Accumulation, 2024, https://huggingface.co/blog/gradient_accumulation
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.measurements import Measurements, is_constant
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV203", "empty-micro-batch"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where a micro-batch without valid targets gives NaN or drops out of the mean."""
    empty = empty_micro_batches(measured)
    if not empty or not measured.divergent:
        return
    which = ", ".join(str(k + 1) for k in empty)
    lost = [k for k in empty if not math.isfinite(measured.micro_losses[k])]
    effect = "its mean loss is 0/0" if lost else "it takes a share of the mean and adds nothing"
    rows = [row for row in measured.rows if math.isnan(row.difference_norm) and row.reason.startswith("not finite")]
    shown = f"gradients {rows[0].reason}: `{rows[0].name}`" if rows else measured.largest
    yield Finding(
        CODE, NAME, "fault", f"micro-batch {which} of {measured.steps} has no valid target: {effect}",
        evidence=(
            Evidence("micro-batch-weights", "measured",
                     f"{shown}; valid targets per micro-batch: {', '.join(f'{n:g}' for n in measured.valid_targets)}",
                     {"valid_targets": list(measured.valid_targets)}),
        ),
        remedy="divide the summed loss by the valid targets of the whole window, which is never zero",
        proven=True,
    )  # fmt: skip


def empty_micro_batches(measured: Measurements) -> list[int]:
    """Returns the positions of micro-batches whose loss counted no target."""
    return [k for k, count in enumerate(measured.valid_targets) if not count > 0]


def explains_weights(measured: Measurements) -> bool:
    """Whether empty micro-batches are all that is wrong with the weights: the others have equal ones."""
    empty = empty_micro_batches(measured)
    if not empty or measured.fit is None:
        return False
    return is_constant([c for k, c in enumerate(measured.fit.weights) if k not in empty], measured.fit.residual)
