"""GAV302 unalignable-randomness (fault or note): random draws that cannot be dealt out per sample.

What it finds

Draws whose values for a sample depend on how many samples were drawn with it, so that no replay can give both runs
the same ones: numbers from a Python or NumPy generator of your own, a permutation of the batch, rejection sampling,
a kernel that draws inside, a step that runs the forward twice with different masks.

In a training loop: draws inside the forward whose shape or number depends on the batch in another way than row by
row: a permutation of the batch, draws per expert, a draw more or less than in the full batch.

Why gradients diverge

The full batch asks its generator for B values, a micro-batch for B/K. gaverify replays torch's own draws row by
row, and those of Python's and NumPy's global generators; a draw that it cannot see, or that has no rows, stays
different. The two gradients are then two samples of a random quantity: what is measured is noise, and a fault could
hide in it.

A real fault is a second pass that does not repeat the draws of the first, as in a two-pass contrastive step whose
recomputed embeddings have another dropout mask: the cached gradient belongs to embeddings that no longer exist.

Signature in the numbers

- The draws are listed with the reason why they could not be dealt out.
- The difference is of the order of the gradient's sampling noise, and changes with `--seed`.
- A fault where it decides the verdict; a note where the runs agree all the same, or another cause explains them.
- In a training loop: A difference that changes with the seed, while the draws named here were not aligned.

Example

A model:

    import random

    import torch
    from torch import nn

    generator = random.Random(0)
    model = nn.Linear(6, 3)
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        noise = torch.tensor([[generator.gauss(0, 1)] for _ in inputs])
        logits = model(inputs + noise.to(inputs.dtype))
        return nn.functional.cross_entropy(logits, classes)

A training loop:

    for i, (x, y) in enumerate(loader):
        partner = torch.randperm(len(x))  # mixes the samples
        (criterion(model(x), model(x)[partner]) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

One torch operation that draws a row per sample (it can be replayed), a draw that comes with the batch, or one draw
per forward whatever the batch. In a two-pass step replay the generator per micro-batch, as
`gaverify.remedies.CachedGradients` does.

A model:

    import torch
    from torch import nn

    model = nn.Linear(6, 3)
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        noise = torch.randn(len(inputs), 1, dtype=inputs.dtype)
        return nn.functional.cross_entropy(model(inputs + noise), classes)

A training loop:

    for i, (x, y) in enumerate(loader):
        noise = torch.rand(len(x), 1)  # one value for each row
        (criterion(model(x) + noise, y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Where the draws are independent per sample and merely cannot be seen: training with accumulation is then as good as
without, and only this comparison is blind. Switch the noise off to verify the rest.

In a training loop: where the draw is only an augmentation: the runs then agree in expectation.

References

- PyTorch, Reproducibility, https://docs.pytorch.org/docs/stable/notes/randomness.html
- PyTorch, torch.utils.checkpoint (`preserve_rng_state`), https://docs.pytorch.org/docs/stable/checkpoint.html
- huggingface/sentence-transformers#3862 (recomputed with another mask),
  https://github.com/huggingface/sentence-transformers/pull/3862
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding, Location
from gaverify.rules.controls import control, first_operation, left_by, proven, rest_of
from gaverify.rules.rule import Rule, controlled, measured

RULE = Rule("GAV302", "unalignable-randomness")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a fault where a draw that cannot be dealt out decides the result, a note where something else does."""
    decisive = next((cause for cause in facts.forward.causes if cause.suspect.kind == "random"), None)
    if facts.loop is not None and facts.loop.agrees:
        return  # what was drawn made no difference that could be seen
    reasons = dict(facts.draws.unaligned)
    if facts.draws.foreign_differ:
        reasons["Python or NumPy generator"] = "how much is drawn depends on the batch"
    if not reasons and decisive is None:
        return
    text = "; ".join(f"`{name}`: {why}" for name, why in reasons.items())
    evidence = [measured("random-draws", text, **dict(reasons))] if reasons else []
    if decisive is not None:
        evidence += [first_operation(facts, decisive), control(facts, decisive)]
    still = facts.draws.control
    if still is not None:
        without = facts.draws.alone == 0  # measured, with the causes that are named neutralised
        rest = "the causes named beside it are left, and without them the draws make none" if without else ""
        text = left_by(still) + ("" if still.rounding else f": {rest or rest_of(facts, still)}")
        if facts.draws.alone > 0:
            text += f"; with the other causes neutralised the draws alone make {facts.draws.alone:.0e}: proven"
        evidence.append(controlled("random-draws", text, left=still.left))
    decides = decisive is not None or (still is not None and still.rounding) or facts.draws.alone > 0
    # An audit cannot hold a script's draws constant, so that it proves nothing by them: it leaves the question open.
    fault = facts.loop is None and bool(facts.compared.divergent) and (decides or not explained(facts))
    yield RULE.finding(
        "random draws could not be dealt out per sample",
        *evidence,
        severity="fault" if fault else "note",
        location=decisive.suspect.operation.location if decisive is not None else _place(facts),
        remedy="draw per sample (one value for each row of the batch), or once per forward"
        + (", or switch it off here" if facts.loop is not None else ""),
        proven=(decisive is not None and proven(facts, decisive))
        or (still is not None and still.rounding)
        or facts.draws.alone > 0,
    )


def _place(facts: Facts) -> Location | None:
    """Where the first draw that could not be dealt out was made."""
    place = next(iter(facts.draws.places.values()), None)
    return Location(file=place[0], line=place[1]) if place is not None else None


def explained(facts: Facts) -> bool:
    """Whether another cause was found."""
    state = facts.state is not None and bool(facts.state.blamed)
    return bool(facts.forward.causes) or facts.weights.blamed or state
