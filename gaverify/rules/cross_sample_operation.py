"""GAV102 cross-sample-operation: another operation inside the model mixes the samples of a batch.

What it finds

An operation between the model's input and its outputs whose result for one sample depends on the other samples, and
that is no normalisation of channels (that is GAV101): attention or a softmax over the batch dimension, a mean, rank
or deviation over the batch that is fed back into the samples, a permutation that pairs samples, expert capacity
shared by the tokens of a batch, or a branch that is taken for some batches only.

Why gradients diverge

Let f_i(x_1 … x_B) be the output for sample i. Accumulation computes f_i from the micro-batch of i alone, so that

    ∂ f_i / ∂ x_j ≠ 0 for some j ≠ i

makes both the value and the gradient of sample i change with the cut of the batch. The usual accident is a layout:
an operation that expects the batch in another dimension than it gets. `nn.MultiheadAttention` and
`nn.TransformerEncoderLayer` read (time, batch, features) unless `batch_first=True` is given; handed (batch, time,
features) they run without complaint, and every sample attends to all the others.

Signature in the numbers

- The first diverging operation lies inside a module of the model, at the line that is printed; the rows of its
  inputs agree, those of its result do not.
- A result with two dimensions of the batch's size is a cross-sample matrix.
- With the reduction over the batch (or the operation's result) held constant in both runs the difference falls to
  rounding. In a training script the module's own code hands each micro-batch the values, and the gradients, of its
  samples in the full batch.

Example

    import torch
    from torch import nn

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, num_heads=2)
            self.head = nn.Linear(8, 3)

        def forward(self, x):  # (batch, time, features)
            mixed, _ = self.attention(x, x, x)
            return self.head(mixed.mean(1))

    model = Pooled()
    batch = torch.randn(16, 5, 8), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

Use instead

The operation over the dimension that was meant, here with `batch_first=True`. Where samples have to meet, let them
meet in data that comes with the batch, or take statistics that do not depend on the micro-batch.

    import torch
    from torch import nn

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x):  # (batch, time, features)
            mixed, _ = self.attention(x, x, x)
            return self.head(mixed.mean(1))

    model = Pooled()
    batch = torch.randn(16, 5, 8), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

When it is harmless

Where mixing is the purpose and the recipe is tuned at the micro-batch's size: the minibatch deviation of a
progressive GAN, MixUp partners within the micro-batch, expert capacity per micro-batch. The training is then sound,
but it is that of the smaller batch: changing K changes the model that is learnt.

References

- PyTorch, MultiheadAttention (`batch_first`),
  https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html
- T. Karras et al., Progressive Growing of GANs, 2018, section 3 (minibatch deviation),
  https://arxiv.org/abs/1710.10196
- H. Zhang et al., mixup: Beyond Empirical Risk Minimization, 2018, https://arxiv.org/abs/1710.09412
- W. Fedus et al., Switch Transformers, 2022, section 2.2 (expert capacity), https://arxiv.org/abs/2101.03961
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.controls import control, first_operation, held_remedy, paired_remedy, proven
from gaverify.rules.rule import Rule
from gaverify.rules.wording import module_name

RULE = Rule("GAV102", "cross-sample-operation")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding per operation inside the model that mixes samples."""
    for cause in facts.forward.causes:
        suspect = cause.suspect
        if not suspect.in_model or suspect.statistics or suspect.kind == "random":
            continue
        operation = suspect.culprit
        branches = suspect.kind == "control-flow"
        what = "takes another way for another batch" if branches else "mixes the samples of a batch"
        yield RULE.finding(
            f"{module_name(operation.module, operation.kind)} {what}",
            first_operation(facts, cause),
            control(facts, cause),
            location=operation.location,
            remedy=held_remedy(cause)
            or paired_remedy(suspect)
            or "let the operation see one sample at a time, or statistics that do not depend on the micro-batch",
            proven=proven(facts, cause),
        )
