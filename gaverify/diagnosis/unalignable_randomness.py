"""GAV302 unalignable-randomness (fault or note): random draws that cannot be dealt out per sample.

What it finds

Draws whose values for a sample depend on how many samples were drawn with it, so that no replay can give both runs
the same ones: numbers from a Python or NumPy generator of your own, a permutation of the batch, rejection sampling,
a kernel that draws inside, a step that runs the forward twice with different masks.

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

Example

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

Use instead

One torch operation that draws a row per sample (it can be replayed), a draw that comes with the batch, or one draw
per forward whatever the batch. In a two-pass step replay the generator per micro-batch, as
`gaverify.remedies.CachedGradients` does.

    import torch
    from torch import nn

    model = nn.Linear(6, 3)
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        noise = torch.randn(len(inputs), 1, dtype=inputs.dtype)
        return nn.functional.cross_entropy(model(inputs + noise), classes)

When it is harmless

Where the draws are independent per sample and merely cannot be seen: training with accumulation is then as good as
without, and only this comparison is blind. Switch the noise off to verify the rest.

References

- PyTorch, Reproducibility, https://docs.pytorch.org/docs/stable/notes/randomness.html
- PyTorch, torch.utils.checkpoint (`preserve_rng_state`), https://docs.pytorch.org/docs/stable/checkpoint.html
- huggingface/sentence-transformers#3862 (recomputed with another mask),
  https://github.com/huggingface/sentence-transformers/pull/3862
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.diagnosis.wording import control, first_operation, proven
from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding, Location

CODE, NAME = "GAV302", "unalignable-randomness"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a fault where a draw that cannot be dealt out decides the result, a note where something else does."""
    decisive = next((cause for cause in measured.causes if cause.suspect.kind == "random"), None)
    reasons = dict(measured.draws_unaligned)
    if measured.foreign_draws_differ:
        reasons["Python or NumPy generator"] = "how much is drawn depends on the batch"
    if not reasons and decisive is None:
        return
    text = "; ".join(f"`{name}`: {why}" for name, why in reasons.items())
    evidence = [Evidence("random-draws", "measured", text, dict(reasons))] if reasons else []
    if decisive is not None:
        evidence += [first_operation(measured, decisive), *control(measured, decisive)]
    still = measured.draw_control
    if still is not None:
        text = f"with {still.what} in both runs the difference is {still.left:.0e}: " + (
            "proven" if still.rounding else "another cause is left"
        )
        if measured.draws_alone > 0:
            text += f"; with the other causes neutralised the draws alone make {measured.draws_alone:.0e}: proven"
        evidence.append(Evidence("random-draws", "control", text, {"left": still.left}))
    decides = decisive is not None or (still is not None and still.rounding) or measured.draws_alone > 0
    fault = bool(measured.divergent) and (decides or not explained(measured))
    yield Finding(
        CODE, NAME, "fault" if fault else "note", "random draws could not be dealt out per sample",
        location=decisive.suspect.operation.location if decisive is not None else _place(measured),
        evidence=tuple(evidence),
        remedy="draw per sample (one value for each row of the batch), or once per forward",
        proven=(decisive is not None and proven(measured, decisive)) or (still is not None and still.rounding)
        or measured.draws_alone > 0,
    )  # fmt: skip


def _place(measured: Measurements) -> Location | None:
    """Where the first draw that could not be dealt out was made."""
    place = next(iter(measured.draw_places.values()), None)
    return Location(file=place[0], line=place[1]) if place is not None else None


def explained(measured: Measurements) -> bool:
    """Whether another cause was found."""
    state = measured.state is not None and bool(measured.state.blamed)
    return bool(measured.causes) or measured.weight_remedy is not None or state
