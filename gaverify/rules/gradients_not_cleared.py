"""GAV602 gradients-not-cleared: a step uses gradients of an earlier window.

What it finds

A step whose gradients hold backward passes that an earlier step has used already, or those of a window that an epoch's
end cut short.

Why gradients diverge

`backward()` adds to `.grad`. What is not cleared after a step is added to the next window, at weights that are no
longer the current ones.

Signature in the numbers

The first update agrees, the later ones do not; no `zero_grad` between two steps, or a window with more backward passes
than K.

Example

    for i, (x, y) in enumerate(loader):
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

Never by accident; methods that mean to keep a share of the old gradient do it in the optimizer's momentum.

References

ultralytics/ultralytics PR#11217 (the opposite repair of the same loop), https://pytorch.org/docs/stable/notes/autograd.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.audit import Record
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding
from gaverify.records.windows import Window
from gaverify.rules.rule import Rule
from gaverify.rules.step_inside_window import steps_before_clearing
from gaverify.rules.wording import counted, passes, place, times, updates

RULE = Rule("GAV602", "gradients-not-cleared")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a step uses old gradients."""
    loop = facts.loop
    if loop is None:
        return
    inside = {number for window, _ in steps_before_clearing(loop) for number in (window.number, window.number + 1)}
    stale = [entry for entry in loop.ledger.stale if entry.step.update not in inside]
    if stale:
        first = stale[0]
        numbers = updates(entry.step.update for entry in stale)
        yield RULE.finding(
            f"the step of update {first.step.update} uses {passes(first.backwards)} of earlier windows again",
            counted(loop.complete[:8]),
            Evidence(
                "events",
                "used again",
                f"{times(len(stale))}, in {numbers}",
                {"updates": [entry.step.update for entry in stale]},
            ),
            location=place(first.step),
            remedy="call `optimizer.zero_grad()` once per update, after the step or before the window's first backward",
            proven=True,
        )
        return
    for window, wanted in _overfull(loop):
        yield RULE.finding(
            f"update {window.number} uses {passes(window.backwards)} where {wanted} are meant: "
            "those that the window before it left over are still in `.grad`",
            counted(loop.complete[:8]),
            location=place(window.steps[0]),
            remedy="step or clear at the end of an epoch: `if (i + 1) % K == 0 or i + 1 == len(loader):`",
            proven=True,
        )
        return


def _overfull(loop: Record) -> list[tuple[Window, int]]:
    """Windows with more backward passes than K after a whole first one."""
    first = loop.first
    if first is None or first.backwards == 0:
        return []
    wanted = loop.steps if loop.steps is not None else first.backwards
    lost = {loss.window for loss in loop.ledger.lost}
    full = {window.number: window.backwards for window in loop.full_windows}
    ordinary = full.get(first.number, 1)
    found = []
    for window in loop.complete:
        alike = window.optimizers == first.optimizers and full.get(window.number, ordinary) == ordinary
        if alike and window.number not in lost and window.backwards > wanted > 1 and first.backwards == wanted:
            found.append((window, wanted))
    return found
