"""GAV402 buffer-drift (fault or note): buffers end up different, because they are updated K times per window.

What it finds

Buffers that a forward writes and training does not read: running statistics of BatchNorm, observers, counters.
After K micro-batches they hold other values than after the full batch, whether the gradients agree or not.

In a training loop: buffers (running statistics, counters) that differ after the update, and moving averages of the
weights that are updated inside a window: torch's, a library's, or tensors of a script's own that are found by becoming
d · (old value) + (1 − d) · (weights). Inside the first window such tensors may still be the weights themselves; the
second shows.

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
- It is a note: the verdict on the gradients stands beside it. Where an update differs, nothing else explains it and an
  average moved inside its window (a momentum encoder that the loss uses), it is suspected.
- In a training loop: Gradients agree or not; the named buffers differ by more than rounding after the same update.

Example

A model:

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

A training loop:

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)

Use instead

Update the buffer once per window, or scale its rate: m' = 1 − (1 − m)^(1/K), about m / K, keeps as much of the old
value per window as before.

A model:

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

A training loop:

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)

When it is harmless

Where averages have long settled: after thousands of updates a running mean with rate m or K · m differs little, it
only forgets faster. It matters for short runs, for evaluation early in training, and for momenta chosen per update.

In a training loop: where nothing reads the buffer, or the rate of its update was chosen for micro-batches.

References

- PyTorch, BatchNorm1d (`momentum`), https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html
- pytorch/pytorch#46516, https://github.com/pytorch/pytorch/issues/46516
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Record
from gaverify.records.events import Event
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, measured
from gaverify.rules.scale import factor_in_loop, weights_of
from gaverify.rules.wording import count, listed, located, times

RULE = Rule("GAV402", "buffer-drift")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a note on buffers that end up different, and one on an average that is updated inside a window."""
    drift = facts.buffers.drift
    if drift:
        are, end = ("are", "end") if len(drift) > 1 else ("is", "ends")
        worst = max(drift, key=lambda name: drift[name])
        differs = f"`{worst}` differs by {drift[worst]:.1e}"
        if math.isnan(drift[worst]):
            differs = f"{count(len(drift), 'buffer')} differ{'' if len(drift) > 1 else 's'} by more than rounding"
        after = f" after update {facts.buffers.update}" if facts.buffers.update is not None else ""
        yield RULE.finding(
            f"{listed([f'`{name}`' for name in drift])} {are} updated {times(facts.steps)} per window and {end} up "
            f"different{after}",
            measured("state", differs, **dict(drift)),
            severity="note",
            remedy="scale the update rate (BatchNorm: momentum / K), if evaluation depends on these buffers",
            proven=True,
        )
    if facts.loop is not None:
        yield from _average(facts.loop)


def _average(loop: Record) -> Iterator[Finding]:
    inside = loop.inside("average")
    if not inside:
        return
    suspected = _blamed(loop, inside)
    number = suspected or inside[0].update
    window = loop.window_of(number)
    total = len(window.of("average")) if window is not None else len(inside)
    yield RULE.finding(
        f"the moving average of the weights is updated {times(total)} in the window of update {number}",
        measured(
            "events",
            f"{len(inside)} updates before the last backward pass of their windows"
            + (f"; if the loss uses what the average gives, update {suspected} differs by that" if suspected else ""),
            inside=len(inside),
        ),
        severity="fault" if suspected else "note",
        location=located([*inside, *(event for each in loop.windows for event in each.of("average"))]),
        remedy="update the average once per optimizer step",
        proven=not suspected,
    )


def _blamed(loop: Record, inside: list[Event]) -> int | None:
    """The first update that differs, if an average moved in its window and neither weights nor a factor explain it.

    In the first window an average that begins as the weights stays what it is: its updates there change nothing.
    """
    update = loop.divergent
    if update is None or update.number < 2 or all(event.update != update.number for event in inside):
        return None
    explained = weights_of(loop) is not None or factor_in_loop(loop, update) is not None
    return None if explained else update.number
