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

from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding
from gaverify.rules.controls import left_by
from gaverify.rules.lost_passes import cleared_before_step, cleared_inside
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.wording import counted, passes, place, updates

RULE = Rule("GAV603", "gradients-cleared-inside-window")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where gradients vanish inside a window."""
    loop = facts.loop
    if loop is None:
        yield from _by_the_forward(facts)
        return
    losses = cleared_inside(loop)
    if not losses:
        return
    first = losses[0]
    total = len(first.backwards) + first.survivors
    what, remedy = f"uses {first.survivors} of {passes(total)}: the others' gradients were cleared", ""
    if cleared_before_step(loop, first):
        what, remedy = "steps without a gradient: it was cleared just before the step", ", never before it"
    yield RULE.finding(
        f"update {first.window} {what}",
        counted(loop.windows[:8]),
        Evidence(
            "events",
            "cleared",
            f"thrown away in {updates(loss.window for loss in losses)}",
            {"updates": [loss.window for loss in losses]},
        ),
        location=place(first.by),
        remedy=f"clear the gradients once per update, after the step{remedy}",
        proven=True,
    )


def _by_the_forward(facts: Facts) -> Iterator[Finding]:
    """A finding where the model or the loss clears the gradients of earlier micro-batches: `zero_grad` inside them."""
    run = facts.backward.kept
    if run is None:
        return
    by = facts.backward.clearing
    line = f"; cleared by {by}: `{by.source}`" if by is not None and by.source else ""
    yield RULE.finding(
        "the forward clears the gradients of the micro-batches before it",
        measured("gradients", f"{facts.compared.largest}{line}"),
        controlled("gradients", left_by(run), left=run.left),
        location=by.location if by is not None else None,
        remedy="clear the gradients once per update, after the step"
        + ("" if by is not None else "; look for `zero_grad` in the loss and in hooks"),
        proven=run.rounding,
    )
