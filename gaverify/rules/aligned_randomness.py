"""GAV301 aligned-randomness (note): random draws were replayed per sample; in training the runs agree in expectation.

What it finds

Dropout, drop-path, noise, random masks and the like, whose draws have a row per sample. gaverify recorded the draws
of the full batch and dealt each micro-batch the rows of its own samples, so that the gradients could be compared at
all.

In a training loop: dropout, drop-path or noise inside the forward whose draws were recorded in the full-batch run and
handed to the accumulated run sample by sample.

Why gradients diverge

They do not, with the same draws. Outside gaverify a generator that is asked for 4 × 2 rows gives other numbers than
one that is asked for 8, so that a comparison of two seeded runs shows a large difference (80 % for a small
transformer encoder) without any fault. With a mask m drawn independently per sample,

    E_m [ Σ_k w_k ∂L_k(m_k)/∂θ ] = E_m [ ∂L(m)/∂θ ]

Both runs are unbiased estimates of the same gradient, with the same variance.

Signature in the numbers

- The verdict is equivalent, and draws were dealt out: the note gives their number.
- The same comparison without replay disagrees by about the gradient's own size wherever dropout is on.
- A draw without a row per sample (`x * torch.rand(())`, LayerDrop, `random.random()` in the forward) is named with
  its line: all micro-batches were given one value here, and draw K of them in training.
- In a training loop: The runs agree to rounding with the dealt draws; outside gaverify they agree in expectation.

Example

A model:

    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

A training loop:

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()  # the model has dropout
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

Nothing has to change. To compare two training runs yourself, switch the random layers off: in `eval` mode, or with
a probability of 0.

A model:

    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    options = {"mode": "eval"}

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

A training loop:

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()  # nothing to repair
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Always: the note is there so that nobody wonders why two seeded runs with different K differ. Resetting the seed
before each micro-batch is no cure but a fault of its own: all micro-batches would then share one mask.

References

- N. Srivastava et al., Dropout, Journal of Machine Learning Research 15, 2014,
  https://jmlr.org/papers/v15/srivastava14a.html
- G. Huang et al., Deep Networks with Stochastic Depth, 2016, https://arxiv.org/abs/1603.09382
- PyTorch, Reproducibility, https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gaverify.records.facts import Draws, Facts
from gaverify.records.findings import Finding, Location
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import count, listed

RULE = Rule("GAV301", "aligned-randomness")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a note where random draws were dealt out per sample, and one where a draw has no row per sample."""
    if facts.draws.dealt > 0:
        yield _dealt(facts.draws)
    # rows that are not the full batch's may be as many as those by chance: what could not be dealt out is no value
    shared = {name: place for name, place in facts.draws.shared.items() if name not in facts.draws.unaligned}
    if shared and facts.steps > 1:
        yield _shared(facts, shared)


def _dealt(draws: Draws) -> Finding:
    were = "was" if draws.count == 1 else "were"
    return RULE.finding(
        f"{count(draws.count, 'random draw')} of the full batch {were} replayed sample by sample",
        measured(
            "random-draws",
            f"{count(draws.dealt, 'draw')} dealt out to micro-batches",
            draws=draws.count,
            dealt=draws.dealt,
        ),
        severity="note",
        remedy="nothing to do: in training the draws differ and the gradients agree in expectation",
        proven=True,
    )


def _shared(facts: Facts, draws: Mapping[str, tuple[str, int] | None]) -> Finding:
    """A value for the whole batch: K micro-batches draw K of them in training, and are given one and the same here."""
    places = {name: f"`{name}`" + (f" at {place[0]}:{place[1]}" if place else "") for name, place in draws.items()}
    first = next((place for place in draws.values() if place is not None), None)
    draw = "draws" if len(draws) == 1 else "draw"
    return RULE.finding(
        f"{listed(list(places.values()))} {draw} one value for the whole batch, not one per sample",
        measured(
            "random-draws",
            f"all {facts.steps} micro-batches were given the full batch's value; in training a window draws "
            f"{facts.steps} of them, which has the same mean and another variance",
            shared=list(draws),
        ),
        severity="note",
        location=Location(file=first[0], line=first[1]) if first is not None else None,
        remedy="draw a value per sample, or once per window where one value is meant",
        proven=True,
    )
