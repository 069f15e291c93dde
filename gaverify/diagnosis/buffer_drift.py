"""GAV402 buffer-drift (note): buffers end up different, because they are updated K times per window.

What it finds

Buffers that a forward writes and training does not read: running statistics of BatchNorm, observers, counters.
After K micro-batches they hold other values than after the full batch, whether the gradients agree or not.

Why gradients diverge

They do not: nothing in the backward reads these buffers. What differs is what evaluation, or a later phase of
training with frozen statistics, will use. A moving average r ← (1 − m) r + m x keeps of its old value

    full batch  1 − m          accumulated  (1 − m)^K

so that after K micro-batches it has moved about K times as far. Each x is the mean of a smaller batch besides, and
the mean of the micro-batches' variances is smaller than the variance of the full batch, as it lacks the variance
between their means.

Signature in the numbers

- The difference of a buffer after both strategies, relative to its norm: 0.71 for the first window of a moving
  average with m = 0.1 and K = 4 that starts from zero (1 − 0.1 / (1 − 0.9^4) = 0.71).
- It is a note: the verdict on the gradients stands beside it.

Example

    import torch
    from torch import nn

    class Tracked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(x.mean(0), 0.1)
                return x
            return x - self.mean

    model = nn.Sequential(
        nn.Linear(6, 8), Tracked(), nn.ReLU(), nn.Linear(8, 3)
    )
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

Use instead

Update the buffer once per window, or scale its rate: m' = 1 − (1 − m)^(1/K), about m / K, keeps as much of the old
value per window as before.

    import torch
    from torch import nn

    class Tracked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            return x if self.training else x - self.mean

        @torch.no_grad()
        def update(self, mean):  # once per window, after optimizer.step()
            self.mean.lerp_(mean, 0.1)

    model = nn.Sequential(
        nn.Linear(6, 8), Tracked(), nn.ReLU(), nn.Linear(8, 3)
    )
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

When it is harmless

Where averages have long settled: after thousands of updates a running mean with rate m or K · m differs little, it
only forgets faster. It matters for short runs, for evaluation early in training, and for momenta chosen per update.

References

- PyTorch, BatchNorm1d (`momentum`), https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html
- pytorch/pytorch#46516, https://github.com/pytorch/pytorch/issues/46516
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV402", "buffer-drift"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a note where buffers end up different after K micro-batches than after the full batch."""
    if not measured.drift:
        return
    worst = max(measured.drift, key=lambda name: measured.drift[name])
    names = ", ".join(f"`{name}`" for name in list(measured.drift)[:3])
    more = f" and {len(measured.drift) - 3} more" if len(measured.drift) > 3 else ""
    verbs = ("are", "end") if len(measured.drift) > 1 else ("is", "ends")
    yield Finding(
        CODE, NAME, "note",
        f"{names}{more} {verbs[0]} updated {measured.steps} times per window and {verbs[1]} up different",
        evidence=(Evidence("state", "measured", f"`{worst}` differs by {measured.drift[worst]:.1e}",
                           dict(measured.drift)),),
        remedy="scale the update rate (BatchNorm: momentum / K), if evaluation depends on these buffers", proven=True,
    )  # fmt: skip
