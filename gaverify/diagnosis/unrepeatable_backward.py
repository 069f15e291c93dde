"""GAV303 unrepeatable-backward: the full batch's gradient differs from itself when it is computed again.

What it finds

Two runs of the full batch with the same weights, samples, state and draws that agree in the loss and not in the
gradient: a backward that keeps state between calls (running scales, counters, error feedback), draws anew, or
recomputes the forward with another mask.

Why gradients diverge

There is no such thing as *the* full-batch gradient: it depends on how often the backward ran before. With

    backward(g) = g / s,     s ← 0.9 s + 0.1 ‖g‖

the scale after K small gradients is not the one after one large gradient, and the gradients of one window are
divided by K different scales.

Signature in the numbers

- The loss repeats to the last bit, the gradient does not: it differs by 43 % in the example.
- Only parameters before the stateful backward are affected.
- Atomic additions in another order also change the last bits; they stay below 1e-9 in float64 and are not reported.

Example

    import torch
    from torch import nn

    class Balanced(torch.autograd.Function):
        scale = 1.0

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            norm = float(gradient.norm())
            Balanced.scale = 0.9 * Balanced.scale + 0.1 * norm
            return gradient / Balanced.scale

    class Body(nn.Sequential):
        def forward(self, x):
            return self[1](Balanced.apply(self[0](x)))

    model = Body(nn.Linear(6, 8), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

Use instead

A backward that is a function of its inputs alone. Keep the scale fixed within a window and move it once per window,
in the training loop after `optimizer.step()`.

    import torch
    from torch import nn

    class Balanced(torch.autograd.Function):
        scale = 0.3  # moved by the training loop, after optimizer.step()

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / Balanced.scale

    class Body(nn.Sequential):
        def forward(self, x):
            return self[1](Balanced.apply(self[0](x)))

    model = Body(nn.Linear(6, 8), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

When it is harmless

Stochastic rounding of gradients is unbiased and meant to differ from call to call; delayed scaling (float8) moves
slowly. Verify with it switched off, and judge the rest.

References

- PyTorch, Reproducibility, https://docs.pytorch.org/docs/stable/notes/randomness.html
- PyTorch, torch.utils.checkpoint, https://docs.pytorch.org/docs/stable/checkpoint.html
- P. Micikevicius et al., FP8 Formats for Deep Learning, 2022, https://arxiv.org/abs/2209.05433
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV303", "unrepeatable-backward"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where two runs of the full batch agree in the loss and not in the gradient."""
    twice = measured.repeatability
    if twice is None or not twice.backward > measured.repeats or twice.forward > measured.repeats:
        return
    yield Finding(
        CODE, NAME, "fault", "the full batch's gradient differs from itself when it is computed again",
        evidence=(
            Evidence("repeatability", "measured",
                     f"same weights, same samples, same draws: loss agrees, gradient differs by {twice.backward:.1e}",
                     {"forward": twice.forward, "backward": twice.backward}),
        ),
        remedy="look for a backward that draws anew or keeps state between calls", proven=True,
    )  # fmt: skip
