"""GAV608 scaler-per-micro-batch: a `GradScaler` is unscaled or updated before the window's last backward pass.

What it finds

`GradScaler.unscale_` or `GradScaler.update` between the backward passes of one window.

Why gradients diverge

`.grad` holds the running sum. Unscaling it and adding gradients of the next micro-batch, which are still scaled, mixes
two units; updating the scale inside a window gives its micro-batches different scales.

Signature in the numbers

K calls per update in place of one; the earlier micro-batches have weights that are too small by the scale.

Example

    for i, (x, y) in enumerate(loader):
        with torch.autocast(device, torch.float16):
            loss = criterion(model(x), y) / K
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if (i + 1) % K == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

Use instead

    for i, (x, y) in enumerate(loader):
        with torch.autocast(device, torch.float16):
            loss = criterion(model(x), y) / K
        scaler.scale(loss).backward()
        if (i + 1) % K == 0:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

When it is harmless

With a scale of 1, or a scaler that is disabled (nothing is reported for that one).

References

pytorch/pytorch PR#36601, https://pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import located, times

RULE = Rule("GAV608", "scaler-per-micro-batch")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a scaler is unscaled or updated inside a window."""
    loop = facts.loop
    if loop is None:
        return
    inside = [event for event in loop.inside("scaler") if not event.values.get("skipped")]
    inside = [event for event in inside if event.values.get("call") in ("unscale_", "update")]
    if not inside:
        return
    number = inside[0].update
    calls = Counter(f"`{event.values['call']}`" for event in inside if event.update == number)
    text = " and ".join(f"{call} {times(count)}" for call, count in calls.items())
    yield RULE.finding(
        f"the gradient scaler works inside the window of update {number}: {text} before its last backward pass",
        measured(
            "events",
            f"{len(inside)} calls on a half-summed gradient in all recorded windows",
            inside=len(inside),
            update=number,
        ),
        location=located(inside),
        remedy="call `unscale_`, `step` and `update` once per update, after the last backward pass",
        proven=True,
    )
