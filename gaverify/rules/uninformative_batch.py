"""GAV901 uninformative-batch (note): the data of this verification could not have shown a fault.

What it finds

A batch on which a faulty and a right recipe give the same gradient: identical samples, equal numbers of valid
targets under `ignore_index`, gradients that are all zero, or K = 1.

In a training loop: runs that fed the same micro-batches, gradients that are all zero, and padded batches whose
micro-batches happen to have the same number of valid targets.

Why gradients diverge

They do not, and that is the trouble: an equivalent verdict on such a batch says nothing about the data of the training.

- Identical samples have the same statistics in every micro-batch: BatchNorm agrees to rounding.
- With equal counts n_k = N / K the average of means is the mean: GAV202 vanishes.
- With zero gradients every recipe gives zero.
- With K = 1 the full batch is compared with itself.

Signature in the numbers

- The verdict is equivalent where a part of the faults could have shown, and inconclusive where nothing but a wrong
  scale could (identical samples without random draws, gradients that are all zero); the note says what the batch lacks.
- In the example every micro-batch has 8 valid targets; ragged rows give a difference of 40 to 50 % (GAV202).
- In a training loop: Equal counts of valid targets although some targets are ignored; K = 1; every gradient zero.

Example

A model:

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

A training loop:

    for i, (tokens, targets) in enumerate(loader):  # rows of equal length
        logits = model(tokens).flatten(0, 1)
        loss = cross_entropy(logits, targets.flatten(), ignore_index=-100)
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

Different samples of different lengths, as the training will see them: a batch from the real loader. Here with the
weights that such a batch needs.

A model:

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

A training loop:

    for i, (tokens, targets) in enumerate(loader):  # rows of different length
        logits = model(tokens).flatten(0, 1)
        loss = cross_entropy(logits, targets.flatten(), ignore_index=-100)
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Where the training data are like that: all rows packed to the same length, no ignored targets. The verdict then
holds for them, and only for them.

References

- huggingface/transformers#34191 (counts that differ between micro-batches),
  https://github.com/huggingface/transformers/pull/34191
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, measured

RULE = Rule("GAV901", "uninformative-batch")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a note where one micro-batch, identical samples, zero gradients or equal counts could hide a fault."""
    reasons = list(_of_a_run(facts) if facts.loop is None else _of_a_loop(facts))
    counts = facts.weights.valid_targets
    averaged = facts.loop is not None or facts.weights.weighting == "uniform"
    equal = len(counts) > 1 and len(set(counts)) == 1
    if facts.weights.ignored_targets and equal and averaged and not facts.compared.divergent:
        reasons.append(
            f"every micro-batch has {counts[0]:g} valid targets: averaging them equally is right on this batch only"
        )
    if not reasons:
        return
    yield RULE.finding(
        "; ".join(reasons),
        measured("batch-quality", "; ".join(reasons), valid_targets=list(counts)),
        severity="note",
        remedy="verify on a batch of different samples with different numbers of valid targets",
        proven=True,
    )


def _of_a_run(facts: Facts) -> Iterator[str]:
    if facts.steps == 1 and facts.ranks is None:
        yield "K = 1: the full batch was compared with itself"
    if facts.identical:
        unseen = "" if facts.blind else "; what they draw at random tells them apart"
        yield f"all samples are identical, so that samples acting on each other could not show{unseen}"
    rows = facts.compared.rows
    if _all_zero([row for row in rows if not math.isnan(row.difference_norm)]):
        yield "every gradient is zero"
    hooked = facts.backward.hooked
    if hooked and all(math.isnan(row.difference_norm) for row in rows):
        names = ", ".join(f"`{name}`" for name in hooked[:3])
        yield f"hooks on {names} take the gradients away before anything is compared (optimizer in backward?)"


def _of_a_loop(facts: Facts) -> Iterator[str]:
    first = facts.loop.updates[0] if facts.loop is not None and facts.loop.updates else None
    if facts.loop is None or first is None or first.outcome is Outcome.DIVERGENT:
        return
    if facts.loop.same_pieces:
        yield "both runs fed the first update in the same pieces: the full batch was compared with itself"
    if _all_zero(first.parameters):
        yield "every gradient is zero"


def _all_zero(rows: Sequence[ParameterComparison]) -> bool:
    return bool(rows) and all(row.reference_norm == row.accumulated_norm == 0 for row in rows)
