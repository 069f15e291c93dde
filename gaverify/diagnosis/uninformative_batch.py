"""GAV901 uninformative-batch (note): the data of this verification could not have shown a fault.

What it finds

A batch on which a faulty and a right recipe give the same gradient: identical samples, equal numbers of valid
targets under `ignore_index`, gradients that are all zero, or K = 1.

Why gradients diverge

They do not, and that is the trouble: an equivalent verdict on such a batch says nothing about the data of the training.

- Identical samples have the same statistics in every micro-batch: BatchNorm agrees to rounding.
- With equal counts n_k = N / K the average of means is the mean: GAV202 vanishes.
- With zero gradients every recipe gives zero.
- With K = 1 the full batch is compared with itself.

Signature in the numbers

- The verdict is equivalent (or inconclusive), and the note says what the batch lacks.
- In the example every micro-batch has 8 valid targets; ragged rows give a difference of 40 to 50 % (GAV202).

Example

    import torch
    from torch import nn

    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    tokens = torch.randint(11, (8, 6))
    labels = tokens.roll(-1, dims=1)
    labels[:, 4:] = -100  # the same padding in every row
    batch = tokens, labels

    def loss(model, batch):
        tokens, labels = batch
        logits = model(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten())

Use instead

Different samples of different lengths, as the training will see them: a batch from the real loader. Here with the
weights that such a batch needs.

    import torch
    from torch import nn

    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    tokens = torch.randint(11, (8, 6))
    labels = tokens.roll(-1, dims=1)
    for row, length in enumerate((6, 2, 1, 3, 5, 6, 2, 4)):
        labels[row, length:] = -100
    batch = tokens, labels
    options = {"weighting": "tokens"}

    def loss(model, batch):
        tokens, labels = batch
        logits = model(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten())

When it is harmless

Where the training data are like that: all rows packed to the same length, no ignored targets. The verdict then
holds for them, and only for them.

References

- huggingface/transformers#34191 (counts that differ between micro-batches),
  https://github.com/huggingface/transformers/pull/34191
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV901", "uninformative-batch"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a note where one micro-batch, identical samples, zero gradients or equal counts could hide a fault."""
    reasons = []
    if measured.steps == 1:
        reasons.append("K = 1: the full batch was compared with itself")
    if measured.identical:
        reasons.append("all samples are identical, so that samples acting on each other could not show")
    finite = [row for row in measured.rows if not math.isnan(row.difference_norm)]
    if finite and all(row.reference_norm == 0 and row.accumulated_norm == 0 for row in finite):
        reasons.append("every gradient is zero")
    if measured.hooked and all(math.isnan(row.difference_norm) for row in measured.rows):
        names = ", ".join(f"`{name}`" for name in measured.hooked[:3])
        reasons.append(f"hooks on {names} take the gradients away before anything is compared (optimizer in backward?)")
    counts = measured.valid_targets
    equal = bool(counts) and len(set(counts)) == 1 and len(counts) > 1
    if measured.ignored_targets and equal and measured.weighting == "uniform" and not measured.divergent:
        reasons.append(
            f"every micro-batch has {counts[0]:g} valid targets: averaging them equally is right on this batch only"
        )
    if not reasons:
        return
    yield Finding(
        CODE, NAME, "note", "; ".join(reasons),
        evidence=(Evidence("batch-quality", "measured", "; ".join(reasons), {"valid_targets": list(counts)}),),
        remedy="verify on a batch of different samples with different numbers of valid targets", proven=True,
    )  # fmt: skip
