"""GAV301 aligned-randomness (note): random draws were replayed per sample; in training the runs agree in expectation.

What it finds

Dropout, drop-path, noise, random masks and the like, whose draws have a row per sample. gaverify recorded the draws
of the full batch and dealt each micro-batch the rows of its own samples, so that the gradients could be compared at
all.

Why gradients diverge

They do not, with the same draws. Outside gaverify a generator that is asked for 4 × 2 rows gives other numbers than
one that is asked for 8, so that a comparison of two seeded runs shows a large difference (80 % for a small
transformer encoder) without any fault. With a mask m drawn independently per sample,

    E_m [ Σ_k w_k ∂L_k(m_k)/∂θ ] = E_m [ ∂L(m)/∂θ ]

Both runs are unbiased estimates of the same gradient, with the same variance.

Signature in the numbers

- The verdict is equivalent, and draws were dealt out: the note gives their number.
- The same comparison without replay disagrees by about the gradient's own size wherever dropout is on.

Example

    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

Use instead

Nothing has to change. To compare two training runs yourself, switch the random layers off: in `eval` mode, or with
a probability of 0.

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

from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV301", "aligned-randomness"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a note where random draws were dealt out per sample."""
    if measured.draws_sliced == 0:
        return
    yield Finding(
        CODE, NAME, "note", f"{measured.draws} random draws of the full batch were replayed sample by sample",
        evidence=(Evidence("random-draws", "measured", f"{measured.draws_sliced} draws dealt out to micro-batches",
                           {"draws": measured.draws, "dealt": measured.draws_sliced}),),
        remedy="nothing to do: in training the draws differ and the gradients agree in expectation", proven=True,
    )  # fmt: skip
