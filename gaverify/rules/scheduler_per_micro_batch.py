"""GAV607 scheduler-per-micro-batch: the learning-rate schedule runs K times too fast.

What it finds

`scheduler.step()` between the backward passes of one window.

Why gradients diverge

They do not: the learning rate does. A schedule that counts micro-batches in place of updates has warmed up and decayed
K times too early, and the weights after the step differ.

Signature in the numbers

Gradients of the first update agree, its learning rate differs; K scheduler steps per update in place of one.

Example

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()

Use instead

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

When it is harmless

Where the schedule's length was given in micro-batches on purpose; its shape within a window is then still lost.

References

https://pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Record
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import located, times, told_apart

RULE = Rule("GAV607", "scheduler-per-micro-batch")
_ROUNDING = 1e-6  # rates that differ by less were computed in another order


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a scheduler steps inside a window."""
    loop = facts.loop
    if loop is None:
        return
    inside = loop.inside("scheduler")
    if not inside:
        return
    number = inside[0].update
    window = loop.window_of(number)
    same = [
        event
        for event in (window.of("scheduler") if window else ())
        if event.values.get("scheduler") == inside[0].values.get("scheduler")
    ]
    yield RULE.finding(
        f"the learning-rate schedule steps {times(len(same))} in the window of update {number}",
        measured("events", _rates(loop, number, len(inside)), inside=len(inside), update=number),
        location=located(inside),
        remedy="step the scheduler once per update, after the optimizer's step",
        proven=True,
    )


def _rates(loop: Record, number: int, count: int) -> str:
    text = f"{count} scheduler steps before the last backward pass of their windows"
    update = next((update for update in loop.updates if update.number == number), None)
    pairs = zip(update.learning_rates, update.learning_rates_full, strict=False) if update is not None else ()
    if update is not None and any(not math.isclose(*pair, rel_tol=_ROUNDING) for pair in pairs):
        rates, full = told_apart(update.learning_rates, update.learning_rates_full)
        text += f"; learning rate of update {number}: {rates}, in the full-batch run {full}"
    return text
