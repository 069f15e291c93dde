"""GAV603 gradients-cleared-inside-window: only the last micro-batches of a window survive.

What it finds

`zero_grad`, or a `.grad` that is set to None or zero by hand, between the backward passes of one window.

Why gradients diverge

The cleared micro-batches never reach the optimizer: the step uses the gradient of what came after the last clearing.

Signature in the numbers

More `zero_grad` than steps; the norm is too small, by K where the loss is divided by K; the weights of the cleared
micro-batches in the step's gradient are zero.

Example

    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()

Use instead

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Where the first backward only finds a direction (sharpness-aware minimisation) and its gradient is thrown away on
purpose; the full-batch run then does the same, and nothing is reported.

References

huggingface/accelerate#616
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record
from gaverify.audit.rules.losses import cleared_inside
from gaverify.audit.rules.wording import counted, passes, place, updates
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV603", "gradients-cleared-inside-window"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a finding where gradients vanish inside a window."""
    losses = cleared_inside(record)
    if not losses:
        return
    first = losses[0]
    total = len(first.backwards) + first.survivors
    yield Finding(
        CODE, NAME, "fault",
        f"update {first.window} uses {first.survivors} of {passes(total)}: the others' gradients were cleared",
        location=place(first.by),
        evidence=(counted(record.windows[:8]),
                  Evidence("events", "cleared", f"thrown away in {updates(loss.window for loss in losses)}",
                           {"updates": [loss.window for loss in losses]})),
        remedy="clear the gradients once per update, after the step", proven=True,
    )  # fmt: skip
