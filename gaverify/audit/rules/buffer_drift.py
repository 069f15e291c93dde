"""GAV402 buffer-drift (note): state that is updated once per forward ends up different.

What it finds

Buffers (running statistics, counters) that differ after the update, and moving averages of the weights that are updated
inside a window.

Why gradients diverge

They need not: buffers that only evaluation reads leave the gradient alone. They see K small batches in place of one
large one, and an average of the weights decays K times as fast.

Signature in the numbers

Gradients agree or not; the named buffers differ by more than rounding after the same update.

Example

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)

Use instead

    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)

When it is harmless

Where nothing reads the buffer, or the rate of its update was chosen for micro-batches.

References

pytorch/pytorch#46516, SWivid/F5-TTS#631
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record
from gaverify.audit.rules.wording import located, times
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV402", "buffer-drift"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a note on drifted buffers and one on an average that is updated inside a window."""
    update = next((update for update in record.updates if update.judged and update.drifted), None)
    if update is not None:
        names = ", ".join(f"`{name}`" for name in update.drifted[:3])
        more = f" and {len(update.drifted) - 3} more" if len(update.drifted) > 3 else ""
        yield Finding(
            CODE, NAME, "note", f"buffers end up different: {names}{more} after update {update.number}",
            evidence=(Evidence("state", "measured", f"{len(update.drifted)} buffers differ by more than rounding",
                               {"buffers": list(update.drifted)}),),
            remedy="scale the update rate (BatchNorm: momentum / K), if evaluation depends on these buffers",
            proven=True,
        )  # fmt: skip
    inside = record.inside("average")
    if inside:
        window = record.window_of(inside[0].update)
        total = len(window.of("average")) if window is not None else len(inside)
        yield Finding(
            CODE, NAME, "note",
            f"the moving average of the weights is updated {times(total)} in the window of update {inside[0].update}",
            location=located(inside),
            evidence=(Evidence("events", "measured",
                               f"{len(inside)} updates before the last backward pass of their windows",
                               {"inside": len(inside)}),),
            remedy="update the average once per optimizer step", proven=True,
        )  # fmt: skip
