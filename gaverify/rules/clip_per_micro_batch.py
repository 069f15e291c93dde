"""GAV606 clip-per-micro-batch (fault or note): gradients are clipped before the window's last backward pass.

What it finds

`clip_grad_norm_` or `clip_grad_value_` between the backward passes of one window; or gradients that the script itself
multiplies by another number after each of them, or cuts element by element.

Why gradients diverge

Clipping is not linear: the sum of clipped gradients is not the clipped sum. Earlier micro-batches are clipped several
times, because `.grad` holds the running sum.

Signature in the numbers

K clippings per update in place of one; where they were active, micro-batches have unequal weights that depend on their
gradients' norms.

Example

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

While no clipping is active (a note then): the next loss spike will activate it.

References

https://pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Record
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import located, times, weights_text

RULE = Rule("GAV606", "clip-per-micro-batch")
_SAME = 1e-3  # factors that differ by less are one division, rounded


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a fault where clipping inside a window changed gradients, a note where it did not."""
    loop = facts.loop
    if loop is None:
        return
    inside = loop.inside("clip")
    if not inside:
        yield from _by_hand(loop)
        return
    active = [event for event in inside if event.values.get("active")]
    window = loop.window_of(inside[0].update)
    total = len(window.of("clip")) if window is not None else len(inside)
    did = f"{len(active)} of them changed it" if active else "none of them was active"
    yield RULE.finding(
        f"gradients are clipped {times(total)} in the window of update {inside[0].update}",
        measured(
            "events",
            f"{len(inside)} clippings of a half-summed gradient before the last backward pass; {did}",
            inside=len(inside),
            active=len(active),
        ),
        severity="fault" if active else "note",
        location=located([*active, *inside]),
        remedy="clip once per update, between the last backward pass and the step",
        proven=True,
    )


def _by_hand(loop: Record) -> Iterator[Finding]:
    """The same where the script does it itself: gradients shrink by a number of their own after each backward pass.

    One number that is the same every time is a division, which the weights of the micro-batches tell.
    """
    update = loop.divergent
    edits = [event for event in loop.inside("edited") if update is not None and event.update == update.number]
    factors = [factor for event in edits for factor in event.values["factors"]]
    if update is None or not edits or any(factor is not None and abs(factor) >= 1.0 for factor in factors):
        return
    if loop.together is not None and None in factors:
        return  # the gradient of several ranks, which the script reduces by hand, is no multiple of one rank's own
    usual = factors[0] if len(factors) > 1 else 1 / max(update.backwards, 1)
    if all(factor is not None and math.isclose(factor, usual, rel_tol=_SAME) for factor in factors):
        return
    known = [factor for factor in factors if factor is not None]
    by = f"multiplied by {weights_text(known, each=False)}" if len(known) == len(factors) else "cut element by element"
    yield RULE.finding(
        f"gradients are clipped by hand {times(len(edits))} inside the window of update {update.number}",
        measured("events", f"a half-summed gradient is {by} before the last backward pass", factors=known),
        location=located(edits),
        remedy="clip once per update, between the last backward pass and the step",
        proven=True,
    )
