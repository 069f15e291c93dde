"""GAV502 missing-gradient: a parameter has a gradient in one run and None in the other.

What it finds

A parameter that takes part in the full batch's loss and in none of the micro-batches', or the other way round:
heads and auxiliary losses that are switched on by the batch's size, experts or branches chosen for the batch as a
whole.

In a training loop: a parameter whose `.grad` is None at the step of one run and a tensor in the other.

Why gradients diverge

The graph itself depends on the batch, so that the two losses are different functions of the parameters. `None` is
not zero: an optimizer skips a parameter whose gradient is None, while with a zero gradient weight decay, momentum
and Adam's moving averages go on. `DistributedDataParallel` waits for the gradient that never comes.

Signature in the numbers

- One side has no number to compare; the table says `no gradient (None)` and in which run.
- Other parameters may agree to rounding.
- In a training loop: `None` against a tensor; all other parameters agree or not.

Example

A model:

    import torch
    from torch import nn

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.extra = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            if len(x) < 8:
                return self.head(x)
            return self.head(x) + 0.1 * self.extra(x)

    model = Heads()
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

A training loop:

    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        if len(x) > 4:
            loss = loss + model.auxiliary_loss()
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

Branches that depend on a sample or on a setting, never on how many samples came together.

A model:

    import torch
    from torch import nn

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.extra = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(x) + 0.1 * self.extra(x)

    model = Heads()
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

A training loop:

    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) + model.auxiliary_loss()
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

A parameter that no run uses is None on both sides and not reported. An expert that no sample of this batch reaches
is None on both sides as well.

In a training loop: where the gradient on the other side is zero and the optimizer has neither decay nor momentum.

References

- PyTorch, Optimizer.zero_grad (None against zero),
  https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
- PyTorch, DistributedDataParallel (`find_unused_parameters`),
  https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.audit import Record
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding, Location
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import count

RULE = Rule("GAV502", "missing-gradient")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a parameter has a gradient on one side only."""
    rows = [row for row in facts.compared.divergent if row.why is not None and row.why.missing]
    if not rows:
        return
    names, values = f"`{rows[0].name}`", {"parameters": [row.name for row in rows]}
    have = "has" if len(rows) == 1 else "have"
    names += f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    if facts.loop is not None and _other_optimizers(facts.loop, facts.compared.update):
        yield RULE.finding(
            f"not the same optimizers step in update {facts.compared.update} of both runs",
            measured("events", f"{names} is stepped in one run only", **values),
            remedy="step all optimizers at the same place, at the end of the window",
            proven=True,
        )
        return
    update = "" if facts.loop is None else f" (update {facts.compared.update})"
    yield RULE.finding(
        f"{names} {have} {rows[0].reason}{update}",
        measured("comparison", f"{count(len(rows), 'parameter')} on one side only", **values),
        location=Location(rows[0].name.rpartition(".")[0]),
        remedy="look for a branch that depends on the batch: the parameter is reached on one side only",
        proven=True,
    )


def _other_optimizers(loop: Record, number: int | None) -> bool:
    whole = next((window for window in loop.full_windows if window.number == number), None)
    window = loop.window_of(number) if number is not None else None
    return whole is not None and window is not None and set(whole.optimizers) != set(window.optimizers)
