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
from gaverify.audit.rules.trailing_window_lost import is_tail
from gaverify.audit.rules.wording import counted, passes, place, updates
from gaverify.audit.windows import Loss
from gaverify.results import Evidence, Finding, Outcome

CODE, NAME = "GAV603", "gradients-cleared-inside-window"
_NOTHING = 1e-3  # a micro-batch with less than this share of the largest weight did not reach the step


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


def cleared_inside(record: Record) -> list[Loss]:
    """Returns the losses that are no cut-off tail of an epoch, and that the full batch's run does not have itself."""
    ordinary = {window.number for window in record.full_windows if window.zero_grads > 1}
    return [
        loss
        for loss in record.ledger.losses
        if loss.by is not None
        and not is_tail(record, loss)
        and loss.window not in ordinary
        and not _summed_elsewhere(record, loss)
    ]


def _summed_elsewhere(record: Record, loss: Loss) -> bool:
    """Whether what was cleared still reached the step, through a buffer in which the script sums gradients itself."""
    window, update = record.window_of(loss.window), record.update_of(loss.window)
    if window is None:
        return False
    if update is None:  # calls alone: a gradient that was put in place by hand may hold anything
        return any(step.values.get("by_hand") for step in window.steps)
    if update.judged and update.outcome is Outcome.EQUIVALENT:
        return True
    backwards, fit = window.of("backward"), update.fit
    if fit is None or fit.used_residual > record.tolerance or len(fit.used) != len(backwards):
        return False
    largest = max(map(abs, fit.used))
    lost = [weight for weight, event in zip(fit.used, backwards, strict=True) if event in loss.backwards]
    return all(abs(weight) > _NOTHING * largest for weight in lost)
