"""GAV303 unrepeatable-backward (fault or note): one batch gives two gradients when it is computed twice.

What it finds

Two runs of the full batch with the same weights, samples, state and draws that agree in the loss and not in the
gradient: a backward that draws from a source that no seed reaches, recomputes the forward with another mask, or
keeps state where nothing can restore it.

In a training loop: a script whose two full-batch runs, with weights that differ by one unit roundoff, do not train on
the same thing: other first weights, or gradients that differ by far more than rounding.

Why gradients diverge

There is no such thing as *the* full-batch gradient: it is a random quantity even for one batch and one set of
draws. With

    backward(g) = g · (1 + ε),     ε drawn anew in every call

the full batch meets one ε and the window K different ones. Whether accumulation adds a fault of its own cannot be
told while the reference moves.

Signature in the numbers

- The loss repeats to the last bit, the gradient does not: 1 to 5 % apart in the example.
- Only parameters before the backward in question are affected.
- Atomic additions in another order also change the last bits; they stay below 1e-9 in float64 and are not reported.
- In a training loop: The noise floor is as large as the gradient.

Example

A model:

    import random

    import torch
    from torch import nn

    class Noisy(torch.autograd.Function):
        entropy = random.SystemRandom()  # no seed reaches it

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (1 + Noisy.entropy.uniform(-0.1, 0.1))

    class Body(nn.Sequential):
        def forward(self, x):
            return self[1](Noisy.apply(self[0](x)))

    model = Body(nn.Linear(6, 8), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

A training loop:

    model = build()  # no seed
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

A backward that is a function of its inputs alone. What it draws, draw in the forward with torch's own generator and
keep it for the backward; a recomputation has to start from the generator's state of the forward.

A model:

    import torch
    from torch import nn

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(torch.rand(len(x), 1, dtype=x.dtype))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            (draws,) = ctx.saved_tensors
            return gradient * (0.9 + 0.2 * draws)

    class Body(nn.Sequential):
        def forward(self, x):
            return self[1](Noisy.apply(self[0](x)))

    model = Body(nn.Linear(6, 8), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

A training loop:

    torch.manual_seed(0)
    model = build()
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Stochastic rounding of gradients is unbiased and meant to differ from call to call. Verify with it switched off, and
judge the rest.

It is a fault where gaverify restored everything and the gradient alone came out otherwise. In a training loop it is a
note, and nothing is decided: the script may only want a seed.

References

- PyTorch, Reproducibility, https://docs.pytorch.org/docs/stable/notes/randomness.html
- PyTorch, torch.utils.checkpoint, https://docs.pytorch.org/docs/stable/checkpoint.html
- S. Gupta et al., Deep Learning with Limited Numerical Precision (stochastic rounding), 2015,
  https://arxiv.org/abs/1502.02551
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.audit import Record
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, measured

RULE = Rule("GAV303", "unrepeatable-backward")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a fault where two runs of one batch agree in the loss alone, a note where a script does not repeat."""
    if facts.loop is not None:
        yield from _script(facts.loop)
    twice = facts.repeatability
    if twice is None or not twice.backward > facts.repeats or twice.forward > facts.repeats:
        return
    yield RULE.finding(
        "the full batch's gradient differs from itself when it is computed again",
        measured(
            "repeatability",
            f"same weights, same samples, same draws: loss agrees, gradient differs by {twice.backward:.1e}",
            forward=twice.forward,
            backward=twice.backward,
        ),
        remedy="look for a backward that draws anew or keeps state between calls",
        proven=True,
    )


def _script(loop: Record) -> Iterator[Finding]:
    """Nothing is proven about accumulation where equal runs of a script differ: it may only want a seed."""
    update = next((update for update in loop.updates if update.unrepeatable), None)
    if update is None:
        return
    yield RULE.finding(
        f"the full-batch run does not repeat itself: {update.unrepeatable}",
        measured("noise-floor", f"in update {update.number}: {update.unrepeatable}", update=update.number),
        severity="note",
        remedy="seed every generator at the start of the script (torch, NumPy, random, workers), or pass it a seed",
        proven=True,
    )
